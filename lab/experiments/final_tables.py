"""Tables of what is evaluated after the last round: candidates, foreign classes; and whether training converged."""

import statistics
from collections import Counter
from collections.abc import Sequence

from client_agent.serving.candidates import Base
from lab.experiments.experiment import Experiment
from lab.experiments.intervals import spread
from lab.experiments.places import Place, place_of, places_of, results_at
from lab.experiments.results import Result
from lab.experiments.rows import ReportRow
from lab.experiments.tables import markdown

_CANDIDATES = ("global+prior", "offset+prior", "adapted", "adapted+prior", "alone", "served")
_BASES = (Base.GLOBAL, Base.OFFSET, Base.ADAPTED, Base.ALONE)
_FOREIGN = {"foreign": "", "foreign_without_offset": ", without offset"}
_LATE = 0.8


def served_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return the accuracy of the candidates' members, how often each candidate was chosen, and the models' weights."""
    rows = []
    for method in experiment.methods:
        for place in places_of(results) if method.served else ():
            chosen = results_at(results, place, method.label)
            choices = [choice for result in chosen for choice in result.get("choices", {}).values()]
            if not choices:
                continue
            row = [*_where(place), method.label]
            row += [_mean_of(ReportRow(method.label, final=name), chosen) for name in _CANDIDATES]
            weights: Counter[str] = Counter()
            for choice in choices:
                total = sum(choice["weights"].values())
                for member, weight in choice["weights"].items():
                    weights[member.removesuffix("+prior")] += weight / total
            row += [f"{weights[base] / len(choices):.0%}" for base in _BASES]
            often = Counter(choice["candidate"] for choice in choices).most_common()
            rows.append([*row, ", ".join(f"{name} {count}" for name, count in often)])
    header = ["data", "clients", "DH", "method", *_CANDIDATES, *(f"weight of {base}" for base in _BASES), "chosen"]
    note = (
        "Accuracy, mean over seeds. *served*: every test image is predicted by a candidate that was chosen without it. "
        "*chosen*: how often each candidate is the choice of a client with all of its test images, over all seeds; "
        "*weight*: mean share of each model in the weights of these choices."
    )
    return f"## What is served\n\n{note}\n\n" + markdown(header, rows)


def foreign_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return the accuracy on classes that a client does not have, with and without its offset."""
    images = {place: max(_foreign_images(r) for r in results if place_of(r) == place) for place in places_of(results)}
    columns = [place for place, count in images.items() if count]
    rows = []
    for method in experiment.methods:
        for name, ending in _FOREIGN.items():
            form = ReportRow(method.label, ending, final=name)
            row = [_spread_of(form, results_at(results, place, method.label)) for place in columns]
            if any(cell != "–" for cell in row):
                rows.append([form.title, *row])
    rows.append(["images", *(f"{images[place]:,}" for place in columns)])
    note = (
        "Without the prior, on test images of classes that the client has no training images of, rotated or inverted "
        "as its own. Mean ± standard deviation over seeds. There are no intervals: an image counts at several clients."
    )
    header = ["method", *(f"{place.data}, DH {place.dh:.0%}" for place in columns)]
    table = markdown(header, rows) if columns else "Every client has all classes.\n"
    return f"## Foreign classes\n\n{note}\n\n{table}"


def convergence_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return the accuracy at 80 % of the rounds and at the end."""
    forms = [ReportRow(method.label, curve="accuracy") for method in experiment.methods]
    forms += [ReportRow(m.label, " + prior", curve="reweighted_accuracy") for m in experiment.methods if m.served]
    rows, changes = [], dict[ReportRow, list[float]]()
    for place in places_of(results):
        row = list(_where(place))
        for form in forms:
            pairs = [_late_and_last(result, form) for result in results_at(results, place, form.label)]
            known = [pair for pair in pairs if pair is not None]
            if not known:
                row.append("–")
                continue
            late, last = (statistics.fmean(values) for values in zip(*known, strict=True))
            changes.setdefault(form, []).append(last - late)
            row.append(f"{late:.3f} → {last:.3f}")
        rows.append(row)
    means = [f"{100 * statistics.fmean(changes[form]):+.2f} points" if form in changes else "–" for form in forms]
    rows.append(["*mean change*", "", "", *means])
    header = ["data", "clients", "DH", *(form.title for form in forms)]
    note = "Accuracy at 80 % of the rounds (or the last evaluation before) → at the end; means over seeds."
    return f"## Convergence\n\n{note}\n\n" + markdown(header, rows)


def _foreign_images(result: Result) -> int:
    return int(result.get("final", {}).get("foreign", {}).get("samples", 0))


def _late_and_last(result: Result, form: ReportRow) -> tuple[float, float] | None:
    rounds = result["curve"][-1]["round"]
    late = [row for row in result["curve"] if row["round"] <= _LATE * rounds]
    if not late or late[-1].get(form.curve) is None or result["curve"][-1].get(form.curve) is None:
        return None
    return late[-1][form.curve], result["curve"][-1][form.curve]


def _where(place: Place) -> tuple[str, str, str]:
    return place.data, str(place.clients), f"{place.dh:.0%}"


def _known(form: ReportRow, results: Sequence[Result]) -> list[float]:
    accuracies = [form.accuracy(result, "last") for result in results]
    return [accuracy for accuracy in accuracies if accuracy is not None]


def _mean_of(form: ReportRow, results: Sequence[Result]) -> str:
    values = _known(form, results)
    return f"{statistics.fmean(values):.3f}" if values else "–"


def _spread_of(form: ReportRow, results: Sequence[Result]) -> str:
    return spread(_known(form, results))
