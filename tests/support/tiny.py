"""The smallest federations that still train: LeNet on 16×16 digits, or a net with BatchNorm, of few images."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lab.datasets import load_digits
from lab.simulation import SimulatedClient
from shared.methods import server_half
from shared.methods.base import ClientRecord, RoundTask, ServerState
from shared.plan import FederationPlan, ImagePlan, validate_plan
from shared.tensor_data import TensorData

CLASSES = 4
IMAGE = ImagePlan(channels=1, height=16, width=16)
Tensors = dict[str, Tensor]


def normed_net(channels: int, _height: int, _width: int) -> nn.Module:
    """A backbone with BatchNorm that costs nothing: "support.tiny:normed_net"."""
    layers = [nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers)


NORMED = "support.tiny:normed_net"


def plan_for(
    method: dict[str, Any], backbone: str = "lenet", training: dict[str, Any] | None = None, **top: Any
) -> FederationPlan:
    """A plan of two rounds over four digits."""
    return validate_plan(
        {
            "name": "tiny",
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
    """So many digits 0 … 3."""
    chosen = slice(start, start + count)
    return TensorData(_all_digits().images[chosen], _all_digits().labels[chosen])


def site(name: str, data: TensorData) -> SimulatedClient:
    """A client that tests on what it trains on."""
    counts = tuple(torch.bincount(data.labels, minlength=CLASSES).tolist())
    return SimulatedClient(ClientRecord(name, counts), data, data)


def sites(count: int = 3, images: int = 12) -> list[SimulatedClient]:
    """Clients with different images; the last one holds two classes only."""
    parts = [digits(images, start=number * images) for number in range(count)]
    few = parts[-1].labels < 2
    parts[-1] = TensorData(parts[-1].images[few], parts[-1].labels[few])
    return [site(f"site-{number + 1}", part) for number, part in enumerate(parts)]


def first_task(plan: FederationPlan, client: SimulatedClient, state: ServerState | None = None) -> RoundTask:
    """The client's task in a federation where it is alone and that has just begun, or is in the given state."""
    server, record = server_half(plan), client.record
    state, facts = state or server.initial_state(), server.facts([record])
    return RoundTask(record.id, 1, state.shared, server.personal(state, record, [record], facts), facts)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    """The same names, and the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def differ(one: Tensors, other: Tensors) -> bool:
    """Whether any tensor differs."""
    return any(not torch.equal(one[name], other[name]) for name in one)


_SMALL = {"hidden": 8, "hidden_layers": 1}
_BOUNDED = {"offset_optimizer": "adam", "offset_bound": 0.1, "bounded_clients": "all"}
_NETWORK = {"name": "distrans", "offset_aggregation": "network", "offset_optimizer": "adam"}
# Every method with what it keeps, and those of its options that keep something else.
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
    """The plan of one of these cases."""
    return plan_for(method, backbone, training={} if method["name"] == "pfedme" else {"momentum": 0.5})
