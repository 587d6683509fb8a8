"""Figures as SVG and PNG, one function each; needs the extra `figures`."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from lab.experiments.cells import Cell, Workspace, build_simulation
from lab.experiments.distribution import shares_of
from lab.experiments.experiment import Experiment
from lab.experiments.motivation import cosine_example, linear_example
from lab.experiments.results import Result, data_of
from lab.simulation.controls import EVALUATION_BATCH
from lab.simulation.simulation import Checkpoint, SimulatedClient, Simulation
from shared.contract.errors import DistransError

_MAX_NAMES = 20  # a longer legend would be unreadable
_DASHES = ("--", ":", "-.", (0, (5, 1)))


def curves(experiment: Experiment, results: Sequence[Result], stem: Path) -> None:
    """Plot accuracy over rounds: a panel per data set, number of clients, DH and varied value; a line per method."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        cell = result["cell"]
        varied = "" if cell["varied"] is None else f", {cell['varied']}"
        groups.setdefault((data_of(result), cell["clients"], cell["dh"], varied), []).append(result)
    figure, axes = panels(len(groups))
    for axis, ((data, clients, dh, varied), members) in zip(axes, sorted(groups.items()), strict=True):
        for label in [method.label for method in experiment.methods]:
            curves = [member["curve"] for member in members if member["cell"]["label"] == label]
            if curves:
                rounds = [row["round"] for row in curves[0]]
                _line(axis, rounds, [[row["accuracy"] for row in curve] for curve in curves], label)
        axis.set(title=f"{data}, {clients} clients, DH {dh:.0%}{varied}", xlabel="round", ylabel="accuracy")
        axis.legend(fontsize="small")
    save(figure, stem)


def lines(experiment: Experiment, results: Sequence[Result], stem: Path) -> None:
    """Plot accuracy over the varied setting: a line per data set, number of clients, DH and method."""
    figure, (axis,) = panels(1)
    groups: dict[str, dict[Any, list[float]]] = {}
    for result in results:
        cell = result["cell"]
        name = f"{data_of(result)}, {cell['clients']} clients, DH {cell['dh']:.0%}"
        name += f", {cell['label']}" if len(experiment.methods) > 1 else ""
        groups.setdefault(name, {}).setdefault(cell["varied"], []).append(result[experiment.accuracy]["accuracy"])
    for name, points in groups.items():
        if points.keys() == {None}:  # a method without the varied setting
            axis.axhline(float(np.mean(points[None])), color="0.4", linestyle=_DASHES[len(axis.lines) % 4], label=name)
            continue
        values = sorted(points)
        fewest = min(len(points[value]) for value in values)
        _line(axis, values, np.array([points[value][:fewest] for value in values]).T.tolist(), name, marker="o")
    axis.set(xlabel=experiment.vary.key if experiment.vary else "", ylabel="accuracy", title=experiment.title)
    axis.legend(fontsize="small")
    save(figure, stem)


def umap(experiment: Experiment, results: Sequence[Result], stem: Path, workspace: Workspace) -> None:
    """Plot the features of test images in each method's global model, each image at a client that has its class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from its dependencies
        from umap import UMAP
    seed = min(result["cell"]["seed"] for result in results)
    order = [method.label for method in experiment.methods if not method.alone]  # alone, there is no common model
    chosen = sorted(
        (r for r in results if r["cell"]["seed"] == seed and r["cell"]["label"] in order),
        key=lambda r: order.index(r["cell"]["label"]),
    )
    figure, axes = panels(len(chosen))
    named: set[tuple[str, ...]] = set()
    for axis, result in zip(axes, chosen, strict=True):
        cell = Cell.model_validate(result["cell"])
        features, labels, classes = trained_features(cell, workspace)
        named.add(classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that a fixed random state turns its threads off
            places = UMAP(random_state=seed, n_jobs=1).fit_transform(features)
        colors = mpl.colormaps["tab10" if len(classes) <= 10 else "turbo"].resampled(len(classes))
        for number, name in enumerate(classes):
            of_class = places[labels == number]
            axis.scatter(of_class[:, 0], of_class[:, 1], color=colors(number), s=3, label=name)
        axis.set(title=f"{cell.label}: {cell.data.title}, DH {cell.dh:.0%}", xticks=[], yticks=[])
    if len(named) == 1 and len(next(iter(named))) <= _MAX_NAMES:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right center", markerscale=4, fontsize="small")
    save(figure, stem)


def trained(cell: Cell, workspace: Workspace) -> Simulation:
    """Return the cell's federation after its last round, from its kept model."""
    simulation = build_simulation(cell, workspace)
    if Checkpoint(workspace.checkpoints / cell.id).restore(simulation) is None:
        raise DistransError(f"The trained model of {cell.title} is missing.", next_step="Run the experiment again.")
    return simulation


def trained_features(
    cell: Cell, workspace: Workspace
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], tuple[str, ...]]:
    """Return what the global model feeds its last linear layer for clients' own test images; labels; class names."""
    simulation = trained(cell, workspace)
    pairs = [_client_features(simulation, client) for client in simulation.clients if client.test.samples]
    features, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return features, labels, simulation.plan.classes


def _client_features(
    simulation: Simulation, client: SimulatedClient
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    half, task = simulation.client, simulation.task(client)
    # The global model, as in the paper: personal models separate the clients whatever they learned.
    private = {} if half.offset(task, client.private) is None else client.private
    predictor = half.predictor(task, private, simulation.runtime)
    net = getattr(predictor, "net", None)
    seen: list[torch.Tensor] = []
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)] if net is not None else []

    def keep_input(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[-1] = inputs[0].flatten(1).float().cpu()

    hooks = [layer.register_forward_pre_hook(keep_input) for layer in layers]  # the layer that runs last wins
    labels = []
    for images, targets in client.test.batches(EVALUATION_BATCH, seed=0):
        own = torch.isin(targets, torch.tensor(sorted(client.own_classes)))
        seen.append(torch.empty(0))
        logits = predictor(images[own])
        if not layers:
            seen[-1] = logits.cpu()
        labels.append(targets[own])
    for hook in hooks:
        hook.remove()
    return torch.cat(seen).numpy(), torch.cat(labels).numpy()


def distribution(experiment: Experiment, stem: Path) -> None:
    """Plot which fraction of each class each client has: a panel per data set, number of clients and DH."""
    divisions = list(shares_of(experiment))
    figure, axes = panels(len(divisions))
    for axis, (title, shares) in zip(axes, divisions, strict=True):
        picture = axis.imshow(shares.values.T, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axis.set(title=title, xlabel="client", ylabel="class")
    figure.colorbar(picture, ax=axes, label="fraction of the class")
    save(figure, stem)


def motivation(stem: Path) -> None:
    """Plot both motivating examples: the clients' losses over w, and a federation's loss over rounds and weights."""
    figure, (left, middle, right) = panels(3)
    cosine = cosine_example()
    for name, losses, style in (("without", cosine.plain, "--"), ("with", cosine.shifted, "-")):
        for number, loss in enumerate(losses, start=1):
            left.plot(cosine.weights, loss, style, color=f"C{number - 1}", label=f"client {number} {name} offsets")
    left.set(title="cos(wx)", xlabel="w", ylabel="squared loss")
    for number, means in enumerate(((0.0, 0.0), (1.0, -1.0))):
        for name, use, style in (("without", False, "--"), ("with", True, "-")):
            example = linear_example(with_offsets=use, noise_means=means)
            rounds = np.arange(1, len(example.losses) + 1)
            label = f"{name} offsets, noise means {means[0]:g}, {means[1]:g}"
            for axis, x in ((middle, rounds), (right, example.weights.sum(axis=1))):
                axis.plot(x, example.losses, style, color=f"C{number}", label=label)
    middle.set(title="wx", xlabel="round", ylabel="squared loss")
    right.set(title="wx", xlabel="w₁ + w₂ after each round", ylabel="squared loss")
    for axis in (left, middle, right):
        axis.legend(fontsize="small")
    save(figure, stem)


def _line(axis: Axes, x: Sequence[Any], series: Sequence[Sequence[float]], label: str, marker: str = "") -> None:
    shortest = min(len(values) for values in series)
    values = np.array([one[:shortest] for one in series], dtype=float)
    mean, deviation = values.mean(axis=0), values.std(axis=0)
    (line,) = axis.plot(x[:shortest], mean, label=label, marker=marker or None)
    if len(values) > 1:
        axis.fill_between(x[:shortest], mean - deviation, mean + deviation, color=line.get_color(), alpha=0.2)


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with this many panels."""
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.5 * columns, 3.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def save(figure: Figure, stem: Path) -> None:
    """Write STEM.svg and STEM.png."""
    with mpl.rc_context({"svg.hashsalt": "distrans"}):  # reproducible files
        figure.savefig(stem.with_name(f"{stem.name}.svg"), metadata={"Date": None})
    figure.savefig(stem.with_name(f"{stem.name}.png"), dpi=120)
