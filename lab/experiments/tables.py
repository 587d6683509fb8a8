"""The tables of every report on federations: accuracies, rounds to reach one, and details."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lab.experiments.experiment import Experiment
from lab.experiments.intervals import estimate, spread
from lab.experiments.paper import paper_results, published
from lab.experiments.places import Place, heading, place_of, places_of, results_at
from lab.experiments.results import Result
from lab.experiments.rows import ReportRow, rows_of

_DETAILS = {
    "accuracy": "last",
    "positive_accuracy": "own classes",
    "negative_accuracy": "negatives",
    "negatives_as_own": "negatives → own",
    "binary_accuracy": "own or not",
    "masked_accuracy": "masked",
    "reweighted_accuracy": "+ prior",
    "foreign_offset_accuracy": "foreign offset",
    "alternative_accuracy": "other model",
    "client_std": "spread over clients",
    "offset_motion": "offset motion",
}
_EXPLAINED = {
    "foreign offset": "*foreign offset*: with the offset of the next client.",
    "other model": "*other model*: pFedMe with w_i if it predicts with θ_i, or vice versa.",
}


def accuracy_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return a table per data set: one row per method, one column per number of clients, DH and varied value."""
    parts = ["## Accuracy\n"]
    places = places_of(results)
    for data in dict.fromkeys(place[0] for place in places):
        paper_data = _paper_data(results, data)
        columns = [place for place in places if place[0] == data]
        varied = experiment.vary.key if experiment.vary else None
        header = ["method", *(heading(place, columns, varied) for place in columns)]
        rows = []
        for method in experiment.methods:
            for form in rows_of(method):
                row = [form.title]
                for place in columns:
                    known = published(experiment.paper, paper_data, place.clients, place.dh, form.title)
                    found = _estimate(form, results_at(results, place, method.label), experiment)
                    row.append(found + (f" · paper {known:.3f}" if known is not None else ""))
                rows.append(row)
        rows.append(["test images", *(image_count(results, place) for place in columns)])
        title = data if paper_data == data else f"{data} (paper: {paper_data})"
        parts.append(f"### {title}\n\n" + markdown(header, rows))
    return "\n".join(parts)


def _estimate(form: ReportRow, results: Sequence[Result], experiment: Experiment) -> str:
    accuracies = [form.accuracy(result, experiment.accuracy) for result in results]
    counts = [form.counts(result, experiment.accuracy) for result in results]
    return estimate([a for a in accuracies if a is not None], [c for c in counts if c is not None])


def image_count(results: Sequence[Result], place: Place) -> str:
    """Return the number of test images of all clients together; a range if it depends on the seed."""
    counts = {r["images"]["test"] for r in results if place_of(r) == place and "images" in r}
    return " … ".join(f"{count:,}" for count in sorted({min(counts), max(counts)})) if counts else "–"


def _values(results: Sequence[Result], place: Place, label: str, which: str, name: str) -> list[float]:
    chosen = results_at(results, place, label)
    return [value for result in chosen if (value := result[which].get(name)) is not None]


def rounds_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return the median over seeds of the rounds to exceed each accuracy, next to the paper's; a dash means never."""
    rows = []
    for place in places_of(results):
        for label in [method.label for method in experiment.methods]:
            curves = [r["curve"] for r in results if place_of(r) == place and r["cell"]["label"] == label]
            if not curves:
                continue
            row = [place[0], str(place[1]), f"{place[2]:.0%}", label + ("" if place[3] is None else f" {place[3]}")]
            for target in experiment.reach:
                firsts = [first_round(curve, target) for curve in curves]
                median = statistics.median(math.inf if first is None else first for first in firsts)
                shown = f"{median:g}" if median < math.inf else "–"
                paper = _paper_rounds(label, place[1], target) if experiment.paper == "table5" else None
                row.append(shown + (f" · paper {paper}" if paper else ""))
            rows.append(row)
    header = ["data", "clients", "DH", "method", *(f"> {target:g}" for target in experiment.reach)]
    return "## Rounds to exceed an accuracy\n\n" + markdown(header, rows)


def details_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return the evaluation splits, the controls, how far offsets moved, bytes and seconds."""
    rows = []
    for place in places_of(results):
        for label in [method.label for method in experiment.methods]:
            chosen = [r for r in results if place_of(r) == place and r["cell"]["label"] == label]
            if not chosen:
                continue
            row = [place[0], str(place[1]), f"{place[2]:.0%}", label + ("" if place[3] is None else f" {place[3]}")]
            row.append(spread(_values(results, place, label, "best", "accuracy")))
            for name in _DETAILS:
                values = _values(results, place, label, "last", name)
                row.append(spread(values, "#.2g" if name == "offset_motion" else ".3f"))
            moved = chosen[0]["bytes_per_round"]
            row += [f"{moved['down_shared'] + moved['down_personal']:,}", f"{moved['up']:,}"]
            row.append(f"{statistics.fmean(r['seconds'] for r in chosen):.0f}")
            rows.append(row)
    header = ["data", "clients", "DH", "method", "best", *_DETAILS.values(), "bytes down", "bytes up", "seconds"]
    filled = [number for number in range(len(header)) if any(row[number] != "–" for row in rows)]
    header, *rows = ([line[number] for number in filled] for line in [header, *rows])
    notes = [
        "Last round, except *best*.",
        "*masked* and *+ prior*: the same model with its logits masked to the client's own training classes, or "
        "shifted by how often the client has each class, relative to everybody.",
        *(explanation for name, explanation in _EXPLAINED.items() if name in header),
        "Bytes: tensors that one participant transfers per round.",
    ]
    return "## Details\n\n" + " ".join(notes) + "\n\n" + markdown(header, rows)


def first_round(curve: Sequence[dict[str, Any]], target: float) -> int | None:
    """Return the first evaluated round whose accuracy is above the target."""
    return next((int(row["round"]) for row in curve if (row["accuracy"] or 0) > target), None)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _paper_data(results: Sequence[Result], data: str) -> str:
    cell = next(result["cell"] for result in results if place_of(result)[0] == data)
    return str(cell["stands_for"] or data)


def _paper_rounds(label: str, clients: int, target: float) -> str | None:
    for row in paper_results()["table5_rounds"]:
        if (row["label"], row["clients"]) == (label, clients) and target in row["reach"]:
            return str(row["rounds"][row["reach"].index(target)] or "–")
    return None
