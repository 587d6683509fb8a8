"""A cell: one federation of an experiment, with everything it depends on, and how it is run."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field

from lab.checkpoints import Checkpoint, CheckpointBroken
from lab.controls import Scores, score
from lab.datasets import DataSettings, make_indexed_clients, open_set
from lab.datasets.clients import Negatives
from lab.simulation import RoundOutcome, SimulatedClient, Simulation
from server.pretrained import load_pretrained
from shared.heterogeneity import classes_per_client, distributional_heterogeneity, paper_shares
from shared.method_options import Frozen
from shared.plan import FederationPlan, validate_plan
from shared.runtime import Runtime, select_device
from shared.wire import Spec

_SECONDS_BETWEEN_CHECKPOINTS = 20
Row = dict[str, float | int | None]


class Cell(Frozen):
    """One federation's complete settings; cells with the same settings have the same id."""

    experiment: str
    scale: str
    label: str
    data: DataSettings
    stands_for: str | None = None
    clients: int
    dh: float
    seed: int
    varied: float | int | str | None = None
    plan: dict[str, Any] = Field(description="The plan without the names of the classes.")
    evaluate_every: int = 1
    negatives: Negatives = "auto"
    keep_model: bool = False

    @property
    def id(self) -> str:
        """A digest of all settings."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """For people: `cifar10, 10 clients, DH 80 %, DisTrans, seed 0`."""
        varied = "" if self.varied is None else f" {self.varied}"
        return f"{self.data.title}, {self.clients} clients, DH {self.dh:.0%}, {self.label}{varied}, seed {self.seed}"

    @property
    def rounds(self) -> int:
        """Rounds to run."""
        return int(self.plan["rounds"]["count"])

    def plan_for(self, classes: tuple[str, ...]) -> FederationPlan:
        """The plan, once the classes are known."""
        return validate_plan({**self.plan, "classes": classes})


@dataclass(frozen=True)
class Workspace:
    """Where a cell finds its data and keeps its checkpoint, and what it computes on."""

    data_root: Path
    checkpoints: Path
    device: str = "cpu"


def run_cell(cell: Cell, workspace: Workspace, on_round: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Run a federation to its end, from its checkpoint if there is one; what is to be remembered, as plain data.

    `on_round` is told the number of rounds done, first at the start. Two runs differ in `seconds` alone.
    """
    simulation = build_simulation(cell, workspace)
    checkpoint = Checkpoint(workspace.checkpoints / cell.id)
    curve, seconds = _resume(simulation, checkpoint)
    started = saved = time.monotonic()
    on_round(simulation.round)
    while simulation.round < cell.rounds:
        outcome = simulation.run_round(evaluate=False)
        if simulation.round % cell.evaluate_every == 0 or simulation.round == cell.rounds:
            curve.append(_row(outcome, score(simulation)))
        on_round(simulation.round)
        ended = simulation.round == cell.rounds
        if cell.keep_model if ended else time.monotonic() - saved > _SECONDS_BETWEEN_CHECKPOINTS:
            checkpoint.save(simulation, {"curve": curve, "seconds": seconds + time.monotonic() - started})
            saved = time.monotonic()
    return {
        "id": cell.id,
        "cell": cell.model_dump(mode="json"),
        "versions": {name: version(name) for name in ("distrans", "torch")},
        "dh": distributional_heterogeneity([record.class_counts for record in simulation.roster]),
        "facts": simulation.server.facts(simulation.roster),
        "images": {part: sum(getattr(c, part).samples for c in simulation.clients) for part in ("train", "test")},
        "curve": curve,
        "last": curve[-1],
        "best": max(curve, key=lambda row: row["accuracy"] or 0),
        "bytes_per_round": _bytes(simulation),
        "seconds": round(seconds + time.monotonic() - started, 3),
    }


def build_simulation(cell: Cell, workspace: Workspace) -> Simulation:
    """The cell's federation before its first round."""
    image = validate_plan({**cell.plan, "classes": ("a", "b")}).image
    images = open_set(cell.data, image, workspace.data_root)
    plan = cell.plan_for(images.classes)
    each = classes_per_client(cell.dh, len(images.classes), cell.clients)
    shares = paper_shares(len(images.classes), cell.clients, each, cell.seed)
    clients: list[SimulatedClient] = make_indexed_clients(images, shares, cell.seed, cell.negatives, cell.data.shift)
    return Simulation(plan, clients, Runtime(select_device(workspace.device)), load_pretrained(plan))


def _resume(simulation: Simulation, checkpoint: Checkpoint) -> tuple[list[Row], float]:
    try:
        notes = checkpoint.restore(simulation)
    except CheckpointBroken:
        notes = None  # cut off by a full disk or a crash: the cell starts again
    return (list(notes["curve"]), float(notes["seconds"])) if notes else ([], 0.0)


def _row(outcome: RoundOutcome, scores: dict[str, Scores]) -> Row:
    pooled = sum(scores.values(), Scores())
    plain = pooled.plain
    each = [value.plain.accuracy for value in scores.values() if value.plain.accuracy is not None]
    reports = outcome.reports.values()
    motions = [report.offset_motion for report in reports if report.offset_motion is not None]
    return {
        "round": outcome.round,
        "accuracy": plain.accuracy,
        "positive_accuracy": plain.positive_accuracy,
        "negative_accuracy": plain.negative_accuracy,
        "negatives_as_own": plain.negatives_as_own / plain.negatives if plain.negatives else None,
        "binary_accuracy": plain.binary_accuracy,
        "masked_accuracy": pooled.masked.accuracy,
        "reweighted_accuracy": pooled.reweighted.accuracy,
        "foreign_offset_accuracy": pooled.foreign.accuracy,
        "alternative_accuracy": pooled.alternative.accuracy,
        "client_mean": statistics.fmean(each) if each else None,
        "client_std": statistics.pstdev(each) if each else None,
        "client_min": min(each) if each else None,
        "loss": plain.loss_sum / plain.samples if plain.samples else None,
        "train_loss": statistics.fmean(report.loss for report in reports),
        "offset_motion": statistics.fmean(motions) if motions else None,
    }


def _bytes(simulation: Simulation) -> dict[str, int]:
    """Tensor bytes that one participant moves in a round."""
    task = simulation.task(simulation.clients[0])
    return {
        "down_shared": Spec.of(task.shared).data_bytes,
        "down_personal": Spec.of(task.personal).data_bytes,
        "up": simulation.server.update_spec(task.facts).data_bytes,
        "participants": len(simulation.participants()),
    }
