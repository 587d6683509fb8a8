"""`distrans-lab report`: measured numbers next to the paper's, labeled by data set and scale."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.experiments import Scale
from lab.experiments.cells import Cell
from lab.experiments.communication import communication_table
from lab.experiments.distribution import distribution_table
from lab.experiments.experiment import Experiment, load_experiment
from lab.experiments.motivation import motivation_table
from lab.experiments.paper import paper_results, published
from lab.experiments.results import Result, Results, data_of
from lab.experiments.rows import rows_of
from shared.contract.errors import DistransError
from shared.system.files import write_durably

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
_MAX_TITLES = 5
Place = tuple[str, int, float, Any]  # data set, clients, DH, varied value


def write_report(folder: Path, data_root: Path, scale: Scale | None = None) -> Path:
    """Write report.md and its figures from the results in the folder, and return the report's path.

    If the folder has results at both scales and no scale is given, report the full one.
    """
    if not (folder / "experiment.toml").is_file():
        raise DistransError(f"{folder} has no results.", next_step="Run the experiment first: distrans-lab run FILE")
    experiment = load_experiment(folder / "experiment.toml")
    parts = [f"# {experiment.title}\n"]
    if experiment.kind == "communication":
        parts.append(communication_table())
    elif experiment.kind == "distribution":
        parts.append(distribution_table(experiment))
        parts.append(_figure(experiment, lambda draw: draw.distribution(experiment, folder)))
    elif experiment.kind == "motivation":
        parts.append(motivation_table())
        parts.append(_figure(experiment, lambda draw: draw.motivation(experiment, folder)))
    else:
        parts += _federations(experiment, folder, data_root, scale)
    write_durably(folder / "report.md", "\n".join(parts).encode(), mode=0o644)
    return folder / "report.md"


def _federations(experiment: Experiment, folder: Path, data_root: Path, scale: Scale | None) -> list[str]:
    stored = Results(folder)
    found = stored.load()
    if not found:
        raise DistransError(f"{folder} has no finished federations.", next_step="Run the experiment again.")
    scales: set[Scale] = {result["cell"]["scale"] for result in found}
    scale = scale or (scales.pop() if len(scales) == 1 else "full")
    wanted = experiment.cells(scale)
    results = stored.of(wanted)
    if not results:
        raise DistransError(
            f"The results in {folder} belong to other settings of the experiment.", next_step="Run it again."
        )
    experiment = experiment.scaled(scale)
    others = sum(result["cell"]["scale"] == scale for result in found) - len(results)
    parts = [_settings(experiment, results, scale, len(wanted), others), accuracy_table(experiment, results)]
    if experiment.reach:
        parts.append(rounds_table(experiment, results))
    parts.append(details_table(experiment, results))
    done = {result["id"] for result in results}
    if left := [cell for cell in wanted if cell.id not in done]:
        parts.append(_missing(left, stored))
    if experiment.figure == "umap":
        parts.append(_figure(experiment, lambda draw: draw.umap(experiment, results, folder, data_root)))
    elif experiment.figure != "none":
        parts.append(_figure(experiment, lambda draw: getattr(draw, experiment.figure)(experiment, results, folder)))
    return parts


def _figure(experiment: Experiment, draw: Callable[[ModuleType], None]) -> str:
    """Draw the figure and return its line in the report, or the reason why it could not be drawn."""
    try:
        from lab.experiments import plots

        draw(plots)
    except ImportError:
        return "The figure needs `pip install 'distrans[figures]'`.\n"
    except DistransError as error:
        return f"No figure: {error}\n"
    return f"![{experiment.title}]({experiment.name}.svg)\n"


def _missing(cells: Sequence[Cell], stored: Results) -> str:
    """List the federations without a result, by reason."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        reasons.setdefault(stored.failure(cell) or "not run yet", []).append(cell.title)
    lines = []
    for reason, titles in reasons.items():
        shown = titles[:_MAX_TITLES] + ["…"] * (len(titles) > _MAX_TITLES)
        lines.append(f"- {reason} ({len(titles)}: {'; '.join(shown)})\n")
    return "## Missing\n\n" + "".join(lines)


def _settings(experiment: Experiment, results: Sequence[Result], scale: str, wanted: int, others: int) -> str:
    text = (
        f"Scale **{scale}**: {len(results)} of {wanted} federations finished. Accuracy of the {experiment.accuracy} "
        "round, mean ± standard deviation (seeds)."
    )
    if others:
        text += f" Results omitted because their settings differ: {others}."
    if scale == "small":
        text += " The small form uses other networks, images or rounds than the paper: for orientation only."
    described: dict[str, list[str]] = {}
    for result in results:
        cell = result["cell"]
        data, image, model = cell["data"], cell["plan"]["image"], cell["plan"]["model"]
        facts = [
            f"{image['channels']}×{image['height']}×{image['width']}",
            f"{model['backbone']} from {model['weights']} weights",
            f"{cell['plan']['rounds']['count']} rounds",
            data["classes"] and f"{data['classes']} classes",
            data["train_per_class"] and f"{data['train_per_class']} training images per class",
            data["test_per_class"] and f"{data['test_per_class']} test images per class",
            cell["stands_for"] and f"in place of {cell['stands_for']}",
        ]
        line = ", ".join(fact for fact in facts if fact)
        if line not in described.setdefault(data_of(result), []):
            described[data_of(result)].append(line)
    made = {f"distrans {result['versions']['distrans']} and torch {result['versions']['torch']}" for result in results}
    lines = [f"- {name}: {'; or '.join(lines)}\n" for name, lines in described.items()]
    return f"{text}\n\n{''.join(lines)}- computed with {'; or '.join(sorted(made))}\n"


def accuracy_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return a table per data set: one row per method, one column per number of clients, DH and varied value."""
    parts = ["## Accuracy\n"]
    places = _places(results)
    for data in dict.fromkeys(place[0] for place in places):
        paper_data = _paper_data(results, data)
        columns = [place for place in places if place[0] == data]
        header = ["method", *(_column(place, columns, experiment) for place in columns)]
        rows = []
        for method in experiment.methods:
            for form in rows_of(method):
                row = [form.title]
                for place in columns:
                    known = published(experiment.paper, paper_data, *place[1:3], form.title)
                    chosen = _results_at(results, place, method.label)
                    accuracies = [form.accuracy(result, experiment.accuracy) for result in chosen]
                    found = spread([value for value in accuracies if value is not None])
                    row.append(found + (f" · paper {known:.3f}" if known is not None else ""))
                rows.append(row)
        title = data if paper_data == data else f"{data} (paper: {paper_data})"
        parts.append(f"### {title}\n\n" + markdown(header, rows))
    return "\n".join(parts)


def _column(place: Place, places: Sequence[Place], experiment: Experiment) -> str:
    """Return a heading that distinguishes the column from the others of its table."""
    _, clients, dh, varied = place
    parts = [f"{clients} clients"] if len({other[1] for other in places}) > 1 else []
    if len({other[2] for other in places}) > 1 or not experiment.vary:
        parts.append(f"DH {dh:.0%}")
    if experiment.vary:
        parts.append(f"any {experiment.vary.key}" if varied is None else f"{experiment.vary.key} = {varied}")
    return ", ".join(parts)


def _values(results: Sequence[Result], place: Place, label: str, which: str, name: str) -> list[float]:
    chosen = _results_at(results, place, label)
    return [value for result in chosen if (value := result[which].get(name)) is not None]


def _results_at(results: Sequence[Result], place: Place, label: str) -> list[Result]:
    return [result for result in results if _place(result) == place and result["cell"]["label"] == label]


def rounds_table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return the median over seeds of the rounds to exceed each accuracy, next to the paper's; a dash means never."""
    rows = []
    for place in _places(results):
        for label in [method.label for method in experiment.methods]:
            curves = [r["curve"] for r in results if _place(r) == place and r["cell"]["label"] == label]
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
    for place in _places(results):
        for label in [method.label for method in experiment.methods]:
            chosen = [r for r in results if _place(r) == place and r["cell"]["label"] == label]
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


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Format as `0.812 ± 0.010 (3)`: mean, sample standard deviation, number of seeds."""
    if len(values) < 2:
        return format(values[0], form) if values else "–"
    return f"{statistics.fmean(values):{form}} ± {statistics.stdev(values):{form}} ({len(values)})"


def first_round(curve: Sequence[dict[str, Any]], target: float) -> int | None:
    """Return the first evaluated round whose accuracy is above the target."""
    return next((int(row["round"]) for row in curve if (row["accuracy"] or 0) > target), None)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _place(result: Result) -> Place:
    cell = result["cell"]
    return data_of(result), cell["clients"], cell["dh"], cell["varied"]


def _places(results: Sequence[Result]) -> list[Place]:
    return sorted({_place(result) for result in results}, key=lambda place: (place[:3], str(type(place[3])), place[3]))


def _paper_data(results: Sequence[Result], data: str) -> str:
    cell = next(result["cell"] for result in results if _place(result)[0] == data)
    return str(cell["stands_for"] or data)


def _paper_rounds(label: str, clients: int, target: float) -> str | None:
    for row in paper_results()["table5_rounds"]:
        if (row["label"], row["clients"]) == (label, clients) and target in row["reach"]:
            return str(row["rounds"][row["reach"].index(target)] or "–")
    return None
