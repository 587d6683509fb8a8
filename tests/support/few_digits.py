"""Simulated clients with a few digits each, read as an experiment reads its data sets."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.datasets.clients import make_clients
from lab.datasets.registry import DataSettings, dataset_info, load_image_set
from lab.datasets.splitters import paper_shares
from lab.simulation.simulation import SimulatedClient, Simulation
from shared.contract.plan import FederationPlan, validate_plan

SETTINGS = DataSettings(name="digits", train_per_class=24, test_per_class=8)


def plan_of(method: str = "distrans", **changes: Any) -> FederationPlan:
    """Return a plan of four rounds with half of the clients, for all ten digits."""
    options: dict[str, Any] = {"name": method}
    if method == "distrans":
        options |= {"offset_optimizer": "adam", "generator": {"width": 16, "hidden": 8}}
    return validate_plan(
        {
            "name": "digits",
            "preset": "learned-offset",
            "classes": [str(digit) for digit in range(10)],
            "image": dataset_info("digits").image.model_dump(),
            "method": options | changes.pop("method_options", {}),
            "training": {"lr": 0.1, "batch_size": 16},
            "rounds": {"count": 4, "sample_fraction": 0.5},
            **changes,
        }
    )


def sites(each: int = 4, clients: int = 5) -> list[SimulatedClient]:
    """Return clients with `each` classes."""
    images = load_image_set(SETTINGS, dataset_info("digits").image, Path("unused"))
    return make_clients(images, paper_shares(10, clients, each, seed=0), seed=0)


def everything(simulation: Simulation) -> dict[str, Tensor]:
    """Return all tensors of a federation, at the coordinator and at the clients."""
    kept = {f"{c.record.id} {name}": value for c in simulation.clients for name, value in c.private.items()}
    return {**simulation.state.shared, **simulation.state.private, **kept}


def assert_same(one: Simulation, other: Simulation) -> None:
    """Assert that two federations agree to the bit."""
    assert one.round == other.round
    found, expected = everything(one), everything(other)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
