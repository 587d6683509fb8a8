"""The smallest federations that still train: LeNet or a net with BatchNorm on a few 16×16 digits."""

import functools
from typing import Any

import torch
from support.halves import server_half
from support.tensor_data import TensorData, load_digits
from torch import nn

from lab.simulation.simulation import SimulatedClient
from shared.contract.plan import FederationPlan, ImagePlan, validate_plan
from shared.learning.methods.base import ClientRecord, RoundContext, RoundTask
from shared.learning.methods.tensor_half import TensorState

CLASSES = 4
IMAGE = ImagePlan(channels=1, height=16, width=16)


def normed_net(channels: int, _height: int, _width: int) -> nn.Module:
    """Build a backbone with BatchNorm that costs next to nothing."""
    layers = [nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers)


NORMED = "support.tiny:normed_net"  # as a plan names it


def plan_for(
    method: dict[str, Any], backbone: str = "lenet", training: dict[str, Any] | None = None, **top: Any
) -> FederationPlan:
    """Return a plan of two rounds for four digits."""
    return validate_plan(
        {
            "name": "tiny",
            "preset": "learned-offset",  # plain training: one epoch, no clipping
            "classes": [str(number) for number in range(CLASSES)],
            "image": IMAGE.model_dump(),
            "model": {"backbone": backbone, "activation": "relu"},
            "method": method,
            "training": {"lr": 0.05, "batch_size": 8, **(training or {})},
            "rounds": {"count": 2},
            **top,
        }
    )


@functools.cache
def _all_digits() -> TensorData:
    train, _ = load_digits(IMAGE)
    kept = train.labels < CLASSES
    return TensorData(train.images[kept], train.labels[kept])


def digits(count: int = 24, start: int = 0) -> TensorData:
    """Return some of the digits 0 … 3."""
    chosen = slice(start, start + count)
    return TensorData(_all_digits().images[chosen], _all_digits().labels[chosen])


def site(name: str, data: TensorData) -> SimulatedClient:
    """Return a client that tests on its training data."""
    counts = tuple(torch.bincount(data.labels, minlength=CLASSES).tolist())
    return SimulatedClient(ClientRecord(name, counts), data, data)


def sites(count: int = 3, images: int = 12) -> list[SimulatedClient]:
    """Return clients with different images; the last one has only two classes."""
    parts = [digits(images, start=number * images) for number in range(count)]
    few = parts[-1].labels < 2
    parts[-1] = TensorData(parts[-1].images[few], parts[-1].labels[few])
    return [site(f"site-{number + 1}", part) for number, part in enumerate(parts)]


def first_task(plan: FederationPlan, client: SimulatedClient, state: TensorState | None = None) -> RoundTask:
    """Return the client's task in a federation of its own that has just begun or is in the given state."""
    server, record = server_half(plan), client.record
    state, facts = state or server.initial_state(), server.facts([record])
    return RoundTask(record.id, 1, state.shared, server.personal(state, record, RoundContext([record], facts)), facts)


_SMALL = {"hidden": 8, "hidden_layers": 1}
_BOUNDED = {"offset_optimizer": "adam", "offset_bound": 0.1, "bounded_clients": "all"}
_NETWORK = {"name": "distrans", "offset_aggregation": "network", "offset_optimizer": "adam"}
# Every method, and its options that change which tensors it keeps.
METHOD_CASES: dict[str, dict[str, Any]] = {
    "distrans": {"name": "distrans", "offset_aggregation": "none", "offset_optimizer": "adam"},
    "distrans-network": {**_NETWORK, "generator": {"hidden": 16, "width": 16, "optimizer": "adam"}},
    "distrans-separate": {"name": "distrans", "offset_aggregation": "none", "batchnorm": "separate"},
    "distrans-private": {"name": "distrans", "offset_aggregation": "mean", "batchnorm_statistics": "private"},
    "distrans-bounded": {"name": "distrans", "offset_aggregation": "none", **_BOUNDED},
    "distrans-mean-bounded": {"name": "distrans", "offset_aggregation": "mean", **_BOUNDED},
    "fedavg": {"name": "fedavg"},
    "pfedme": {"name": "pfedme", "inner_steps": 2, "server_mix": 0.5},
    "pfedme-local-copy": {"name": "pfedme", "inner_steps": 2, "predict": "local-copy"},
    "pfedhn": {"name": "pfedhn", **_SMALL},
    "pfedhn-mean": {"name": "pfedhn", "uploads": "mean", "inner_steps": 2, **_SMALL},
    "pfedhn-pc": {"name": "pfedhn-pc", **_SMALL},
    "moon": {"name": "moon", "projection_dim": 8},
    "moon-pool": {"name": "moon", "projection_dim": 8, "previous_models": 2, "server_momentum": 0.5},
    "fedaws": {"name": "fedaws"},
    "fedaws-own-rows": {"name": "fedaws", "evaluation_rows": False, "nearest": 1},
    "mixup": {"name": "mixup"},
    "advprop": {"name": "advprop", "epsilon": 8.0},
    "advprop-private": {"name": "advprop", "auxiliary_batchnorm": "private", "iterations": 2},
}


def method_plan(method: dict[str, Any], backbone: str = "lenet") -> FederationPlan:
    """Return the plan of one of METHOD_CASES."""
    return plan_for(method, backbone, training={} if method["name"] == "pfedme" else {"momentum": 0.5})
