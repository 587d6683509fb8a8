"""A site with real digits and a state folder, and models of its federation, without a coordinator."""

import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from support.halves import server_half

from client_agent.context import AgentContext
from client_agent.data.dataset import DataReport, SiteData, SiteImages
from client_agent.data.sources import digit_images
from client_agent.data.splits import Example
from client_agent.serving.gate import ModelGate
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import Identity, RunOptions
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from client_agent.status import AgentStatus
from shared.contract.plan import FederationPlan, validate_plan
from shared.http.client_connection import Connection
from shared.learning.methods import client_half
from shared.learning.methods.base import ClientRecord, RoundContext, RoundTask, TrainingContext
from shared.learning.runtime import Runtime

CLASSES = ("0", "1", "2", "3")
TOTALS = (100, 100, 100, 100)


def digits_plan(method: dict[str, Any] | None = None, **training: Any) -> FederationPlan:
    """Return a plan for LeNet on the digits 0 … 3."""
    return validate_plan(
        {
            "name": "digits",
            "preset": "learned-offset",  # one epoch per round
            "classes": CLASSES,
            "image": {"channels": 1, "height": 16, "width": 16},
            "method": method or {"name": "distrans", "offset_aggregation": "none"},
            "training": {"lr": 0.05, "batch_size": 8, **training},
        }
    )


PLAN = digits_plan()


def digits_data(train: int = 24, test: int = 24, plan: FederationPlan = PLAN, classes: int = 2) -> SiteData:
    """Return a site with this many images of the digits 0 … classes − 1."""
    images, labels = digit_images()
    known = [place for place, label in enumerate(labels.tolist()) if label < classes][: train + test]
    parts = [
        [Example(images[place], str(int(labels[place]))) for place in part] for part in (known[:train], known[train:])
    ]
    counts = [{name: sum(one.label == name for one in part) for name in plan.classes} for part in parts]
    return SiteData(SiteImages(parts[0], plan), SiteImages(parts[1], plan), DataReport(*counts))


@cache
def _trained(plan: FederationPlan, epochs: int) -> dict[str, torch.Tensor]:
    """Return the weights of a site with all classes after some epochs."""
    data = digits_data(120, 0, plan, classes=4)
    more = plan.model_copy(update={"training": plan.training.model_copy(update={"epochs": epochs})})
    half, me = server_half(more), ClientRecord("elsewhere", tuple(data.report.class_counts.values()))
    state, facts = half.initial_state(), half.facts([me])
    task = RoundTask("elsewhere", 1, state.shared, half.personal(state, me, RoundContext([me], facts)), facts)
    return client_half(more).train(task, {}, TrainingContext(data.train))[0].shared


def federation_model(number: int, *, epochs: int = 0, plan: FederationPlan = PLAN, spoil: bool = False) -> Bundle:
    """Return a model of the federation, trained elsewhere for some epochs; a spoilt one gives wrong answers."""
    half, me = server_half(plan), ClientRecord("north", (1,) * len(plan.classes))
    state = half.initial_state()
    facts = {**half.facts([me]), "class_totals": ",".join(map(str, TOTALS))}
    shared = _trained(plan, epochs) if epochs else state.shared
    if spoil:
        shared = shared | {name: -5 * shared[name] for name in ("logits.weight", "logits.bias")}
    personal = half.personal(state, me, RoundContext([me], facts))
    return Bundle(number, f"{number:064x}", shared, personal, {}, facts)


def new_state(path: Path, plan: FederationPlan = PLAN) -> StateFolder:
    """Create the folder of a site that has joined."""
    folder, connection = StateFolder(path), Connection(server="http://127.0.0.1:9")
    folder.create(
        Identity(
            client_id="1", name="north", token="t", federation=plan.name, plan=plan, connection=connection, data="x"
        )
    )
    return folder


def make_context(state: StateFolder, predictions: PredictionQueue | None = None, **options: Any) -> AgentContext:
    """Return the context of an agent that nobody has connected yet."""
    chosen, identity, status = RunOptions(**options), state.identity(), AgentStatus()
    gate = ModelGate(state, identity, Runtime(), chosen, predictions, status.serve)

    def missing() -> Any:
        raise AssertionError("not needed here")

    return AgentContext(
        state, identity, chosen, Runtime(), gate, status, Console(quiet=True), threading.Event(), missing, missing
    )


def with_stop(context: AgentContext, stopping: threading.Event) -> AgentContext:
    """Return the context with another event that asks it to stop."""
    return replace(context, stopping=stopping)
