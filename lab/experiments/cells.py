"""A cell: one federation of an experiment, with everything it depends on, and how to run it.

Engines give cells to other processes as JSON and get back the JSON of what `attempt` returns.
"""

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from lab.datasets.clients import Negatives, make_clients
from lab.datasets.registry import DataSettings, load_image_set
from lab.datasets.splitters import classes_per_client, paper_shares
from lab.experiments.measurements import Row, measure, transferred_bytes
from lab.simulation.alone import AloneSimulation
from lab.simulation.controls import score
from lab.simulation.final import Counts, FinalPart, fine_tuned, foreign_classes, served
from lab.simulation.simulation import Checkpoint, CheckpointBroken, Simulation
from server.compute.initial_weights import load_pretrained
from shared.contract.errors import DistransError
from shared.contract.frozen import Frozen
from shared.contract.plan import FederationPlan, ImagePlan, validate_plan
from shared.learning.heterogeneity import distributional_heterogeneity
from shared.learning.runtime import Runtime, select_device

PLACEHOLDER_CLASSES = ("a", "b")  # until the images are opened, which names the real ones
ALONE = "alone"  # the folder, in a cell's checkpoint, of clients that train alone for comparison
_SECONDS_BETWEEN_CHECKPOINTS = 20


class Cell(Frozen):
    """Complete settings of one federation, or of clients that train alone; the same settings give the same id."""

    experiment: str
    scale: str
    label: str
    data: DataSettings
    stands_for: str | None = None
    clients: int
    dh: float
    seed: int
    varied: float | int | str | None = None
    plan: dict[str, Any] = Field(description="The plan without class names.")
    evaluate_every: int = 1
    negatives: Negatives = "auto"
    keep_model: bool = False
    alone: bool = Field(False, description="Every client trains by itself.")
    final: tuple[FinalPart, ...] = Field((), description="What to evaluate after the last round.")

    @property
    def id(self) -> str:
        """Digest of all settings that training depends on; `final` is not among them."""
        settings = self.model_dump(mode="json", exclude={"final"} if self.alone else {"final", "alone"})
        if settings["plan"].get("training", {}).get("update_compression") == "none":
            del settings["plan"]["training"]["update_compression"]  # results from before this setting stay valid
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """Display name: `cifar10, 10 clients, DH 80%, DisTrans, seed 0`."""
        varied = "" if self.varied is None else f" {self.varied}"
        return f"{self.data.title}, {self.clients} clients, DH {self.dh:.0%}, {self.label}{varied}, seed {self.seed}"

    @property
    def rounds(self) -> int:
        """Number of rounds to run."""
        return int(self.plan["rounds"]["count"])

    @property
    def image(self) -> ImagePlan:
        """The plan's [image] table."""
        return ImagePlan.model_validate(self.plan["image"])

    def plan_for(self, classes: tuple[str, ...]) -> FederationPlan:
        """Return the complete plan for these classes."""
        return validate_plan({**self.plan, "classes": classes})


@dataclass(frozen=True)
class Workspace:
    """Where a cell finds its data and keeps its checkpoint, and the device it computes on."""

    data_root: Path
    checkpoints: Path
    device: str = "cpu"


class CellObserver(Protocol):
    """Receives what happens to cells, from one thread at a time."""

    def on_round(self, cell: Cell, done: int) -> None:
        """Handle a change in the number of finished rounds; the first call means that the cell has started."""

    def on_finished(self, cell: Cell, result: dict[str, Any]) -> None:
        """Handle the result of a finished cell."""

    def on_failed(self, cell: Cell, reason: str, details: str) -> None:
        """Handle a cell that ended without a result."""


Engine = Callable[[Sequence[Cell], Workspace, CellObserver], None]


def attempt(cell: Cell, workspace: Workspace, on_round: Callable[[int], None]) -> dict[str, Any]:
    """Run a cell and return `{"result": …}`, or `{"reason": …, "details": …}` if it failed."""
    try:
        return {"result": run_cell(cell, workspace, on_round)}
    except DistransError as error:
        return {"reason": str(error), "details": ""}
    except Exception as error:  # one failing cell must not stop the others
        return {"reason": f"{type(error).__name__}: {error}", "details": traceback.format_exc()}


def notify(observer: CellObserver, cell: Cell, outcome: dict[str, Any]) -> None:
    """Pass the outcome of an attempt to the observer."""
    if "result" in outcome:
        observer.on_finished(cell, outcome["result"])
    else:
        observer.on_failed(cell, outcome["reason"], outcome["details"])


def encode_job(cell: Cell, workspace: Workspace) -> str:
    """Encode a cell and its workspace as one line of JSON."""
    places = {
        "data_root": str(workspace.data_root.absolute()),
        "checkpoints": str(workspace.checkpoints.absolute()),
        "device": workspace.device,
    }
    return json.dumps({"cell": cell.model_dump(mode="json"), "workspace": places})


def decode_job(text: str) -> tuple[Cell, Workspace]:
    """Decode what `encode_job` returned."""
    job = json.loads(text)
    places = job["workspace"]
    workspace = Workspace(Path(places["data_root"]), Path(places["checkpoints"]), places["device"])
    return Cell.model_validate(job["cell"]), workspace


def run_cell(cell: Cell, workspace: Workspace, on_round: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Run a federation to its end, from its checkpoint if it has one, and return the result as plain data.

    `on_round` gets the number of finished rounds, first at the start. Two runs differ only in `seconds`.
    """
    simulation = build_simulation(cell, workspace)
    checkpoint = Checkpoint(workspace.checkpoints / cell.id)
    curve, seconds = _resume(simulation, checkpoint)
    started = saved = time.monotonic()
    on_round(simulation.round)
    while simulation.round < cell.rounds:
        outcome = simulation.run_round()
        if simulation.round % cell.evaluate_every == 0 or simulation.round == cell.rounds:
            curve.append(measure(outcome, score(simulation)))
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
        **_finally(cell, simulation, workspace),
        "bytes_per_round": transferred_bytes(simulation),
        "seconds": round(seconds + time.monotonic() - started, 3),
    }


def build_simulation(cell: Cell, workspace: Workspace) -> Simulation:
    """Return the cell's federation before its first round."""
    images = load_image_set(cell.data, cell.image, workspace.data_root)
    plan = cell.plan_for(images.classes)
    each = classes_per_client(cell.dh, len(images.classes), cell.clients)
    shares = paper_shares(len(images.classes), cell.clients, each, cell.seed)
    clients = make_clients(images, shares, cell.seed, cell.negatives, cell.data.shift)
    kind = AloneSimulation if cell.alone else Simulation
    return kind(plan, clients, Runtime(select_device(workspace.device)), load_pretrained(plan))


def _finally(cell: Cell, simulation: Simulation, workspace: Workspace) -> dict[str, Any]:
    """Return the counts of the cell's final evaluation, and the clients' choices if models are served."""
    counts: dict[str, Counts] = {}
    choices: dict[str, Any] = {}
    if "fine-tuned" in cell.final:
        counts["fine_tuned"] = fine_tuned(simulation)
    if "served" in cell.final:
        found = served(simulation, _train_alone(cell, workspace))
        counts |= found.counts
        choices = found.choices
    if "foreign-classes" in cell.final:
        counts |= foreign_classes(simulation)
    return {"final": {name: asdict(counted) for name, counted in counts.items()}, "choices": choices}


def _train_alone(cell: Cell, workspace: Workspace) -> AloneSimulation:
    """Return the cell's clients after training by themselves, with the bits of the cell that does only that."""
    alone = build_simulation(cell.model_copy(update={"alone": True}), workspace)
    assert isinstance(alone, AloneSimulation)  # noqa: S101 - for the type checker
    checkpoint = Checkpoint(workspace.checkpoints / cell.id / ALONE)
    _resume(alone, checkpoint)
    saved = time.monotonic()
    while alone.round < cell.rounds:
        alone.run_round()
        if time.monotonic() - saved > _SECONDS_BETWEEN_CHECKPOINTS:
            checkpoint.save(alone, {"curve": [], "seconds": 0})
            saved = time.monotonic()
    return alone


def _resume(simulation: Simulation, checkpoint: Checkpoint) -> tuple[list[Row], float]:
    try:
        notes = checkpoint.restore(simulation)
    except CheckpointBroken:
        notes = None  # damaged by a full disk or a crash: start over
    return (list(notes["curve"]), float(notes["seconds"])) if notes else ([], 0.0)
