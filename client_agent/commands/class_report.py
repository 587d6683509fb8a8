"""What `distrans-agent status` shows about the served model: scores, the verdict, and each class."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from client_agent.commands.output import out
from shared.contract.errors import DistransError
from shared.system.command_line import print_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from client_agent.state.records import Score, SiteReport

_MAX_PLOTTED = 100  # classes


def percent(rate: float | None) -> str:
    """Return for example 93.1%, or a dash."""
    return "–" if rate is None else f"{rate:.1%}"


def describe_scores(report: "SiteReport") -> list[str]:
    """Return the verdict, the accuracies with their intervals, and the calibration, one line each."""
    from client_agent.state.records import describe_verdict_so_far

    named = {"served": report.served, "alone": report.alone, "global": report.federation}
    scores = [f"{name} {_score(score)}" for name, score in named.items() if score is not None]
    sentence = describe_verdict_so_far(report)
    lines = [f"{sentence}."] if sentence else []
    lines.append(f"Accuracy on {report.served.samples} test images: {', '.join(scores)}")
    if report.calibration_error is not None:
        lines.append(f"Expected calibration error: {percent(report.calibration_error)}")
    return lines


def _score(score: "Score") -> str:
    return f"{percent(score.accuracy)} ({100 * score.interval.low:.1f} to {100 * score.interval.high:.1f})"


def print_classes(report: "SiteReport | None") -> None:
    """Print a table of the classes, and below it what is mistaken for what."""
    if report is None or not report.classes:
        out.print("There are no scores per class: nothing was measured yet, or there are too many classes.")
        return
    table = Table("class", "test images", "sensitivity", "specificity", "AUC", title="Classes")
    for one in report.classes:
        rates = [percent(one.sensitivity), percent(one.specificity), "–" if one.auc is None else f"{one.auc:.3f}"]
        table.add_row(one.label, str(one.images), *rates)
    print_table(table)
    mistakes = Table("class", "predicted as", "test images", title="Mistakes")
    cells = [cell for cell in report.confusion if cell[0] != cell[1]]
    for label, predicted, images in sorted(cells, key=lambda cell: -cell[2]):
        mistakes.add_row(label, predicted, str(images))
    if cells:
        print_table(mistakes)


def plot_classes(report: "SiteReport | None", target: Path, title: str) -> None:
    """Draw the confusion matrix and the rates of each class; raise DistransError if that is not possible."""
    if report is None or not report.classes:
        raise DistransError(
            "There are no scores per class to draw.", next_step="Run distrans-agent run until a model was measured."
        )
    labels = list(dict.fromkeys([one.label for one in report.classes] + [cell[1] for cell in report.confusion]))
    if len(labels) > _MAX_PLOTTED:
        raise DistransError(
            f"{len(labels)} classes do not fit into a drawing; at most {_MAX_PLOTTED} do.",
            next_step="Use status --classes or --json.",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DistransError("Drawings need matplotlib.", next_step="pip install 'distrans[figures]'") from error
    side = max(4.0, 0.4 * len(labels))
    figure = Figure(figsize=(2 * side + 1, side + 1), layout="constrained")
    figure.suptitle(f"{title}, {report.served.samples} test images")
    matrix, rates = figure.subplots(1, 2)
    _draw_confusion(matrix, report, labels)
    _draw_rates(rates, report)
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an unknown suffix
        raise DistransError(f"{target} cannot be written: {error}.", next_step="Use a path ending in .png.") from error


def _draw_confusion(axes: "Axes", report: "SiteReport", labels: list[str]) -> None:
    counts = {(label, predicted): images for label, predicted, images in report.confusion}
    shares = []
    for label in labels:
        total = sum(counts.get((label, other), 0) for other in labels)
        shares.append([counts.get((label, other), 0) / total if total else 0.0 for other in labels])
    axes.imshow(shares, cmap="Greys", vmin=0, vmax=1)
    for (label, predicted), images in counts.items():
        row, column = labels.index(label), labels.index(predicted)
        color = "white" if shares[row][column] > 0.5 else "black"
        axes.text(column, row, str(images), ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="predicted", ylabel="class", title="test images")


def _draw_rates(axes: "Axes", report: "SiteReport") -> None:
    places = range(len(report.classes))
    for name, marker in (("sensitivity", "o"), ("specificity", "s"), ("AUC", "^")):
        values = [getattr(one, name.lower()) for one in report.classes]
        shown = [(value, place) for value, place in zip(values, places, strict=True) if value is not None]
        axes.plot([x for x, _ in shown], [y for _, y in shown], marker, fillstyle="none", color="black", label=name)
    axes.set_yticks(list(places), [one.label for one in report.classes])
    axes.set(xlim=(-0.02, 1.02), ylim=(len(report.classes) - 0.5, -0.5), title="rates")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, frameon=False)
