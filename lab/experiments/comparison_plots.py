"""Figures of a comparison: accuracies by setting, what a foreign offset does, and the learned offsets as images."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.datasets.clients import IndexedData
from lab.experiments.cells import Cell, Workspace
from lab.experiments.experiment import Experiment
from lab.experiments.places import Place, places_of, results_at
from lab.experiments.plots import save, trained
from lab.experiments.results import Result
from lab.experiments.rows import ReportRow, rows_of
from lab.simulation.simulation import Simulation
from shared.contract.errors import DistransError
from shared.learning.verdict import wilson

Picture = np.ndarray[Any, Any]
_MAX_CLIENTS = 10  # per line of offsets
_MAX_CLASSES = 5  # to name under an offset
_OWN_AND_FOREIGN = ("accuracy", "foreign_offset_accuracy")
_SHAPES = ("o", "s", "D", "^", "v", "P")
# Told apart by shape and fill, so that a print without colors can be read.
_STYLES: tuple[dict[str, Any], ...] = (
    {"marker": "o", "color": "0.25", "markerfacecolor": "white"},
    {"marker": "s", "color": "0.55"},
    {"marker": "s", "color": "0.55", "markerfacecolor": "white"},
    {"marker": "^", "color": "0.25", "markerfacecolor": "white"},
    {"marker": "v", "color": "0.25"},
    {"marker": "x", "color": "0.25"},
    {"marker": "+", "color": "0.25"},
    {"marker": "P", "color": "0.55"},
)
_SERVED = {"marker": "D", "color": "tab:red"}


def dots(experiment: Experiment, results: Sequence[Result], stem: Path) -> None:
    """Plot accuracy by setting and method: a panel per data set, a group of dots per setting.

    The bars are the standard deviation over seeds, or with one seed the 95 % interval over its test images.
    """
    rows = _compared(experiment)
    styles = {row: _SERVED if row.final == "served" else _STYLES[n % len(_STYLES)] for n, row in enumerate(rows)}

    def draw(axis: Axes, height: float, place: Place) -> None:
        for number, row in enumerate(rows):
            chosen = results_at(results, place, row.label)
            found = _dot(row, chosen, experiment)
            if found is not None:
                middle, low, high = found
                y = _height(height, number, len(rows))
                bars = np.array([[middle - low], [high - middle]])
                axis.errorbar(middle, y, xerr=bars, label=row.title, markersize=5, linewidth=1, **styles[row])

    seeds = {result["cell"]["seed"] for result in results}
    bars = f"standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else "95 % interval over test images"
    save(_by_setting(results, draw, f"accuracy (bars: {bars})", len(rows)), stem)


def foreign_offsets(experiment: Experiment, results: Sequence[Result], stem: Path) -> None:
    """Plot what happens to the accuracy with the offset of the next client, and without any; means over seeds."""
    measured = {r["cell"]["label"] for r in results if r["last"].get("foreign_offset_accuracy") is not None}
    labels = [method.label for method in experiment.methods if method.label in measured]
    if not labels:
        raise DistransError("No method of this experiment has offsets.")

    def draw(axis: Axes, height: float, place: Place) -> None:
        for number, label in enumerate(labels):
            chosen = results_at(results, place, label)
            y, marker = _height(height, number, len(labels)), _SHAPES[number % len(_SHAPES)]
            own, foreign = (_mean(ReportRow(label, curve=name), chosen) for name in _OWN_AND_FOREIGN)
            if own is None or foreign is None:
                continue
            axis.plot([own, foreign], [y, y], color="0.75", linewidth=1.5, zorder=1)
            style: dict[str, Any] = {"marker": marker, "color": "0.2", "linestyle": ""}
            # The larger one below, so that both can be seen where they are equal.
            axis.plot(
                foreign,
                y,
                label="with the next client's offset",
                markersize=8,
                markerfacecolor="white",
                **style,
            )
            axis.plot(own, y, label=f"{label}, own offset", markersize=4, **style)
            without = _mean(ReportRow(label, final="global"), chosen)
            if without is not None:
                axis.plot(without, y, "|", color="0.2", markersize=10, markeredgewidth=1.5, label="without offset")

    save(_by_setting(results, draw, "accuracy, mean over seeds", len(labels)), stem)


def offsets(experiment: Experiment, results: Sequence[Result], stem: Path, workspace: Workspace) -> None:
    """Show the learned offsets of up to ten clients per setting, for the first seed of methods that are served."""
    labels = [method.label for method in experiment.methods if method.served]
    seed = experiment.seeds[0]  # its models are kept
    chosen = [
        result
        for label in labels
        for place in places_of(results)
        for result in results_at(results, place, label)
        if result["cell"]["seed"] == seed
    ]
    if not chosen:
        raise DistransError("No served method has finished with the first seed.")
    lines = []
    for result in chosen:
        cell = Cell.model_validate(result["cell"])
        title = f"{cell.data.title}\nDH {cell.dh:.0%}" + (f"\n{cell.label}" if len(labels) > 1 else "")
        lines.append((title, _pictures(trained(cell, workspace))))
    save(_grid(lines), stem)


def _grid(lines: Sequence[tuple[str, Sequence[tuple[str, Picture]]]]) -> Figure:
    """Return a figure with lines of pictures, all on one color scale."""
    columns = max(len(pictures) for _, pictures in lines)
    figure = Figure(figsize=(0.95 * columns + 2.2, 1.12 * len(lines) + 0.2), layout="constrained")
    axes = figure.subplots(len(lines), columns, squeeze=False)
    values = np.concatenate([picture.ravel() for _, pictures in lines for _, picture in pictures])
    bound = float(np.percentile(np.abs(values), 99.5)) or 1.0
    for line, (title, pictures) in zip(axes, lines, strict=True):
        for axis in line:
            axis.set_axis_off()
        for axis, (caption, picture) in zip(line, pictures, strict=False):
            shown = axis.imshow(picture, cmap="RdBu_r", vmin=-bound, vmax=bound)
            axis.set_title(caption, fontsize="xx-small", pad=2)
        line[0].text(-0.15, 0.5, title, ha="right", va="center", transform=line[0].transAxes, fontsize="small")
    figure.colorbar(shown, ax=axes, label="offset, in units of the normalized image", fraction=0.02, aspect=30)
    return figure


def _compared(experiment: Experiment) -> list[ReportRow]:
    """Return the rows of all methods; of the compared one, only what is served."""
    return [
        row
        for method in experiment.methods
        for row in rows_of(method)
        if method.label != experiment.compare or row.final == "served"
    ]


def _by_setting(
    results: Sequence[Result],
    draw: Callable[[Axes, float, Place], None],
    axis_label: str,
    methods: int,
) -> Figure:
    """Return a figure with a panel per data set, in which `draw` fills a line per setting, top to bottom."""
    sets: dict[str, list[Place]] = {}
    for place in places_of(results):
        sets.setdefault(place.data.partition(",")[0], []).append(place)
    most = max(len(places) for places in sets.values())
    size = (4.4 * len(sets) + 0.8, max(2.2, most * max(0.6, 0.16 * methods)) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(sets), squeeze=False).ravel().tolist()
    for axis, (name, places) in zip(axes, sets.items(), strict=True):
        ordered = sorted(places, key=lambda place: (place.dh, place.data))
        for number, place in enumerate(ordered):
            if number % 2:
                axis.axhspan(number - 0.5, number + 0.5, color="0.95", zorder=0)
            draw(axis, number, place)
        axis.set_yticks(range(len(ordered)), [_setting(place) for place in ordered])
        axis.set_ylim(len(ordered) - 0.5, -0.5)
        axis.set(title=name, xlabel=axis_label)
        axis.grid(axis="x", color="0.88", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(axis="y", length=0)
    _legend(figure, axes)
    return figure


def _height(setting: float, number: int, methods: int) -> float:
    """Return where a method's dot belongs in its setting's line, which is one unit high."""
    return setting + (number - (methods - 1) / 2) * 0.8 / methods


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    named: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    columns = min(len(named), len(axes) + 1)  # as many as fit into the figure's width
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns, fontsize="small")


def _setting(place: Place) -> str:
    shift = place.data.partition(", ")[2] or "images alike"
    varied = "" if place.varied is None else f"\n{place.varied}"
    return f"DH {place.dh:.0%}\n{shift}{varied}"


def _dot(row: ReportRow, results: Sequence[Result], experiment: Experiment) -> tuple[float, float, float] | None:
    """Return the accuracy and the ends of its bar; None if it is unknown."""
    known = [value for result in results if (value := row.accuracy(result, experiment.accuracy)) is not None]
    if not known:
        return None
    middle = statistics.fmean(known)
    if len(known) > 1:
        return middle, middle - statistics.stdev(known), middle + statistics.stdev(known)
    counts = row.counts(results[0], experiment.accuracy)
    if not counts:
        return middle, middle, middle
    interval = wilson(counts.correct, counts.samples)
    return middle, interval.low, interval.high


def _mean(row: ReportRow, results: Sequence[Result]) -> float | None:
    known = [value for result in results if (value := row.accuracy(result, "last")) is not None]
    return statistics.fmean(known) if known else None


def _pictures(simulation: Simulation) -> list[tuple[str, Picture]]:
    """Return the offsets of the first clients, averaged over color channels, with what is special about the clients."""
    found = []
    for client in simulation.clients[:_MAX_CLIENTS]:
        offset = simulation.client.offset(simulation.task(client), client.private)
        if offset is not None:
            caption = _classes(client.own_classes, len(simulation.plan.classes))
            if isinstance(client.test, IndexedData):
                caption += _look(client.test)
            found.append((caption, offset.mean(dim=0).numpy()))
    return found


def _classes(own: set[int], classes: int) -> str:
    if len(own) == classes:
        return "all classes"
    return " ".join([*map(str, sorted(own)[:_MAX_CLASSES]), *(["…"] if len(own) > _MAX_CLASSES else [])])


def _look(data: IndexedData) -> str:
    if data.shift == "rotated":
        return f", {90 * (data.client % 4)}°"
    return ", inverted" if data.shift == "inverted" and data.client % 2 else ""
