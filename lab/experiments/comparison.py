"""One method against all others: what its agents would serve, in every setting and on average."""

import statistics
from collections.abc import Mapping, Sequence

from lab.experiments.experiment import Experiment
from lab.experiments.places import Place, heading, places_of, results_at
from lab.experiments.results import Result
from lab.experiments.rows import ReportRow, rows_of
from lab.experiments.tables import image_count, markdown

Seeds = Mapping[int, float]  # accuracy by seed
_NOTE = (
    "Means over seeds; the best of the other methods and of *served* is bold. *served − …*: difference in points, mean "
    "± standard deviation over seeds, to {alone}the best row of another method. Means of several settings: only "
    "settings in which every row has a number ({complete} of {count})."
)


def comparison_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return a table with a line per setting and a column per row of the report, and the means of settings."""
    table = _Table(experiment, results)
    places = places_of(results)
    complete = [place for place in places if table.is_complete(place)]
    header = ["setting", "images", *(table.heading(row) for row in table.rows)]
    header += [f"served − {row.title}" for row in table.alone] + ["served − best other"]
    lines = [table.line(place) for place in places]
    lines += [table.mean_line(title, members) for title, members in _groups(complete).items()]
    alone = "".join(f"{row.title} and to " for row in table.alone)
    note = _NOTE.format(alone=alone, complete=len(complete), count=len(places))
    own = f" The columns from *plain* to *served* are {experiment.compare}."
    return f"## {experiment.compare} and the other methods\n\n{note}{own}\n\n" + markdown(header, lines)


class _Table:
    def __init__(self, experiment: Experiment, results: Sequence[Result]) -> None:
        self._experiment, self._results = experiment, results
        self.others = [row for m in experiment.methods if m.label != experiment.compare for row in rows_of(m)]
        self._own = [row for m in experiment.methods if m.label == experiment.compare for row in rows_of(m)]
        self._served = next(row for row in self._own if row.final == "served")
        self.rows = [*self.others, *self._own]
        labels = {method.label for method in experiment.methods if method.alone}
        self.alone = [row for row in self.others if row.label in labels]

    def heading(self, row: ReportRow) -> str:
        """Return a short name: those of the compared method without its label."""
        return row.title if row in self.others else row.ending.removeprefix(",").strip() or "plain"

    def is_complete(self, place: Place) -> bool:
        """Return whether every row has a number there."""
        return all(self._seeds(row, place) for row in self.rows)

    def line(self, place: Place) -> list[str]:
        """Return the line of one setting."""
        start = [self._title(place), image_count(self._results, place)]
        return start + self._cells({row: self._seeds(row, place) for row in self.rows})

    def mean_line(self, title: str, places: Sequence[Place]) -> list[str]:
        """Return the line of the means of several settings, seed by seed as far as they have the same seeds."""
        values: dict[ReportRow, Seeds] = {}
        for row in self.rows:
            found = [self._seeds(row, place) for place in places]
            common = set.intersection(*(set(seeds) for seeds in found))
            values[row] = {seed: statistics.fmean(seeds[seed] for seeds in found) for seed in sorted(common)}
        return [f"*{title}*", "", *self._cells(values)]

    def _title(self, place: Place) -> str:
        same = [other for other in places_of(self._results) if other.data == place.data]
        key = self._experiment.vary.key if self._experiment.vary else None
        return f"{place.data}, {heading(place, same, key)}"

    def _seeds(self, row: ReportRow, place: Place) -> Seeds:
        chosen = results_at(self._results, place, row.label)
        found = {result["cell"]["seed"]: row.accuracy(result, self._experiment.accuracy) for result in chosen}
        return {seed: accuracy for seed, accuracy in found.items() if accuracy is not None}

    def _cells(self, values: Mapping[ReportRow, Seeds]) -> list[str]:
        means = {row: statistics.fmean(seeds.values()) for row, seeds in values.items() if seeds}
        compared = [row for row in [*self.others, self._served] if row in means]
        best = max((means[row] for row in compared), default=None)
        cells = []
        for row in self.rows:
            shown = f"{means[row]:.3f}" if row in means else "–"
            cells.append(f"**{shown}**" if row in compared and means[row] == best else shown)
        cells += [_difference(values[self._served], values[row]) for row in self.alone]
        others = [row for row in self.others if row in means]
        if not others:
            return [*cells, "–"]
        leader = max(others, key=lambda row: means[row])
        difference = _difference(values[self._served], values[leader])
        return [*cells, difference if difference == "–" else f"{difference} ({leader.title})"]


def _groups(places: Sequence[Place]) -> dict[str, list[Place]]:
    """Return the groups of two or more settings to average: by data set, by what differs between clients, and all."""
    groups: dict[str, list[Place]] = {}
    for name in (_data_name, _kind):
        for place in places:
            groups.setdefault(f"mean, {name(place)}", []).append(place)
    groups["mean of all"] = list(places)
    return {title: members for title, members in groups.items() if len(members) > 1}


def _data_name(place: Place) -> str:
    return place.data.partition(",")[0]


def _kind(place: Place) -> str:
    shift = place.data.partition(", ")[2] or "images alike"
    return f"DH {place.dh:.0%}, {shift}"


def _difference(one: Seeds, other: Seeds) -> str:
    """Return the difference in points over the seeds that both have."""
    values = [100 * (one[seed] - other[seed]) for seed in one if seed in other]
    if len(values) < 2:
        return f"{values[0]:+.1f}" if values else "–"
    return f"{statistics.fmean(values):+.1f} ± {statistics.stdev(values):.1f}"
