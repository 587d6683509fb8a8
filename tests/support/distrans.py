"""DisTrans federations small enough for unit tests: LeNet on 16×16 digits, and a roster of three clients."""

import functools
from typing import Any

import numpy as np
import torch
from support.halves import server_half
from support.tensor_data import TensorData, load_digits
from torch import Tensor

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan, ImagePlan, validate_plan
from shared.learning.heterogeneity import class_embeddings
from shared.learning.methods import client_half
from shared.learning.methods.base import (
    ClientRecord,
    Facts,
    RoundContext,
    RoundTask,
    TrainingContext,
    Update,
)
from shared.learning.methods.tensor_half import TensorState
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors

SHAPE = (1, 16, 16)
RULES = ["alternating", "joint"]


def plan_with(
    shape: tuple[int, int, int] = SHAPE, classes: int = 10, training: dict[str, Any] | None = None, **method: Any
) -> FederationPlan:
    """Return a small plan with the paper's settings and these method options."""
    channels, height, width = shape
    return validate_plan(
        {
            "name": "distrans",
            "preset": "paper",
            "classes": [str(number) for number in range(classes)],
            "image": {"channels": channels, "height": height, "width": width},
            "model": {"activation": "relu"},
            "method": {"offset_aggregation": "none", **method},
            "training": {"lr": 0.05, "batch_size": 16, **(training or {})},
        }
    )


def options_of(plan: FederationPlan) -> DistransOptions:
    """Return the plan's method options."""
    assert isinstance(plan.method, DistransOptions)
    return plan.method


@functools.cache
def digits(count: int = 160, channels: int = 1) -> TensorData:
    """Return the first training digits."""
    image = ImagePlan(channels=channels, height=16, width=16)
    train, _ = load_digits(image)
    return TensorData(train.images[:count], train.labels[:count])


def record(name: str, *counts: int) -> ClientRecord:
    """Return a client with these class counts."""
    return ClientRecord(name, counts)


ROSTER = [record("a", 30, 10, 0), record("b", 10, 30, 5), record("c", 0, 20, 5)]


def task_for(plan: FederationPlan, client: str = "a", number: int = 0) -> RoundTask:
    """Return the client's first task in a federation of its own."""
    server, own = server_half(plan), record(client, *[5] * len(plan.classes))
    state, facts = server.initial_state(), server.facts([own])
    return RoundTask(client, number, state.shared, server.personal(state, own, RoundContext([own], facts)), facts)


def train(
    plan: FederationPlan,
    data: TensorData | None = None,
    private: Tensors | None = None,
    runtime: Runtime | None = None,
    task: RoundTask | None = None,
) -> tuple[Update, Tensors]:
    """Train for one round; return the update and the private tensors."""
    context = TrainingContext(digits() if data is None else data, runtime or Runtime())
    return client_half(plan).train(task or task_for(plan), private or {}, context)


def small_plan(**method: Any) -> FederationPlan:
    """Return a plan for `ROSTER` with a small aggregation network."""
    generator = {"hidden": 12, "width": 16, **method.pop("generator", {})}
    return plan_with(classes=3, generator=generator, **method)


def uploads_of(*names: str) -> list[tuple[ClientRecord, Tensors]]:
    """Return random offsets as uploads of these clients."""
    generator = torch.Generator().manual_seed(7)
    offsets = {client.id: torch.randn(SHAPE, generator=generator) for client in ROSTER}
    return [(client, {"offset": offsets[client.id]}) for client in ROSTER if client.id in names]


def finished(
    plan: FederationPlan, uploads: list[tuple[ClientRecord, Tensors]], state: TensorState | None = None
) -> tuple[TensorState, Facts]:
    """Finish a round with these uploads; return the new state and the facts."""
    server = server_half(plan)
    facts, state = server.facts(ROSTER), state or server.initial_state()
    return server.finish(state, state.shared, uploads, RoundContext(ROSTER, facts)), facts


def embedding_of(client: ClientRecord) -> Tensor:
    """Return the class embedding of a client in `ROSTER`."""
    counts = np.array([other.class_counts for other in ROSTER])
    return torch.from_numpy(class_embeddings(counts)[ROSTER.index(client)]).float()


def everyone_gets(plan: FederationPlan, state: TensorState, facts: Facts) -> dict[str, Tensors]:
    """Return the personal tensors sent to each client in `ROSTER`."""
    server = server_half(plan)
    return {client.id: server.personal(state, client, RoundContext(ROSTER, facts)) for client in ROSTER}
