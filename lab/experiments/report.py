"""`distrans-lab report`: measured numbers next to the paper's, labeled by data set and scale."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lab.experiments import Scale
from lab.experiments.cells import Cell, Workspace
from lab.experiments.communication import communication_table
from lab.experiments.comparison import comparison_table
from lab.experiments.distribution import distribution_table
from lab.experiments.experiment import Experiment, load_experiment
from lab.experiments.final_tables import convergence_table, foreign_table, served_table
from lab.experiments.intervals import EXPLANATION
from lab.experiments.motivation import motivation_table
from lab.experiments.results import Result, Results, data_of
from lab.experiments.tables import accuracy_table, details_table, rounds_table
from shared.contract.errors import DistransError
from shared.system.files import write_durably

_MAX_TITLES = 5


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
        parts.append(_figure(experiment, "distribution", folder))
    elif experiment.kind == "motivation":
        parts.append(motivation_table())
        parts.append(_figure(experiment, "motivation", folder))
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
    parts = [_settings(experiment, results, scale, len(wanted), others)]
    parts += [table(experiment, results) for table in _tables(experiment)]
    done = {result["id"] for result in results}
    if left := [cell for cell in wanted if cell.id not in done]:
        parts.append(_missing(left, stored))
    workspace = Workspace(data_root, stored.checkpoints)
    parts += [_figure(experiment, kind, folder, results, workspace) for kind in experiment.figure]
    return parts


def _tables(experiment: Experiment) -> list[Callable[[Experiment, Sequence[Result]], str]]:
    """Return the tables that the experiment asks for, in order."""
    tables = [
        (comparison_table, experiment.compare is not None),
        (accuracy_table, True),
        (served_table, any(method.served for method in experiment.methods)),
        (foreign_table, experiment.foreign_classes),
        (convergence_table, experiment.compare is not None),
        (rounds_table, bool(experiment.reach)),
        (details_table, True),
    ]
    return [table for table, wanted in tables if wanted]


def _figure(
    experiment: Experiment, kind: str, folder: Path, results: Sequence[Result] = (), workspace: Workspace | None = None
) -> str:
    """Draw a figure and return its line in the report, or the reason why it could not be drawn."""
    name = experiment.name if len(experiment.figure) < 2 else f"{experiment.name}-{kind}"
    try:
        from lab.experiments.figures import draw

        draw(kind, experiment, results, folder / name, workspace)
    except ImportError:
        return "The figure needs `pip install 'distrans[figures]'`.\n"
    except DistransError as error:
        return f"No figure: {error}\n"
    return f"![{experiment.title}]({name}.svg)\n"


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
        f"round. {EXPLANATION}"
    )
    if experiment.accuracy == "best" and any(method.final for method in experiment.methods):
        text += " Fine-tuned and served models are always of the last round."
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
