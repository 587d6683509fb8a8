"""Model gates with small models."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from support.halves import server_half
from torch import Tensor

from client_agent.data.dataset import DataReport, SiteData
from client_agent.serving.gate import ModelGate
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import Identity, RunOptions
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from shared.contract.measurements import Evaluation
from shared.contract.plan import validate_plan
from shared.http.client_connection import Connection
from shared.learning.methods.base import ClientRecord, RoundContext
from shared.learning.runtime import Runtime

PLAN = validate_plan(
    {
        "name": "pets",
        "classes": ["cat", "dog"],
        "image": {"channels": 1, "height": 16, "width": 16},
        "method": {"offset_aggregation": "none"},
    }
)


def score(correct: int) -> Evaluation:
    """Return a score on 100 images."""
    return Evaluation(samples=100, correct=correct, loss_sum=1.0)


def bundle(number: int) -> Bundle:
    """Return a model with the initial weights."""
    half, me = server_half(PLAN), ClientRecord("north", (1, 1))
    state, facts = half.initial_state(), half.facts([me])
    return Bundle(
        number, f"digest-{number}", state.shared, half.personal(state, me, RoundContext([me], facts)), {}, facts
    )


def new_state(path: Path) -> StateFolder:
    """Create the folder of a site that has joined."""
    folder = StateFolder(path)
    folder.create(
        Identity(
            client_id="1", name="north", token="t", federation="pets", plan=PLAN,
            connection=Connection(server="http://127.0.0.1:9"), data="sklearn:digits",
        )
    )  # fmt: skip
    return folder


def make_gate(state: StateFolder, predictions: PredictionQueue | None, margin: float | None = 0.1) -> ModelGate:
    """Return a gate for a state folder."""
    return ModelGate(state, state.identity(), Runtime(), RunOptions(max_accuracy_drop=margin), predictions)


def bring(gate: ModelGate, state: StateFolder, number: int) -> GateDecision:
    """Store a new model and let the gate decide about it."""
    one = bundle(number)
    state.models.save(one, keep=9)
    return gate.consider(one, None)


def served(gate: ModelGate) -> int | None:
    """Return the number of the served model."""
    return None if gate.served is None else gate.served.key.number


class Interrupting:
    """Held-out images that trigger an event in the middle of a measurement."""

    def __init__(self, event: Callable[[], None], samples: int) -> None:
        self._event, self.samples, self.unreadable = event, samples, ["image"] * (samples - 1)
        self.labels = torch.zeros(samples, dtype=torch.int64)

    def in_order(self, _size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        self._event()
        yield torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 16, 16), self.labels[:1]


def site_data(event: Callable[[], None], samples: int = 1) -> SiteData:
    """Return a site with `samples` held-out images, of which one can be read."""
    images: Any = Interrupting(event, samples)
    return SiteData(images, images, DataReport({"cat": 1, "dog": 1}, {"cat": 1, "dog": 0}))
