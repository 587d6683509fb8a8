"""How far offsets may move from their initial value, and at which clients."""

from typing import Any

import pytest
import torch
from support.tensor_data import TensorData
from support.tiny import digits, plan_for, site

from lab.simulation.simulation import SimulatedClient, Simulation

BOUND = 0.02


def one_class(name: str) -> SimulatedClient:
    data = digits(40)
    chosen = data.labels == 1
    return site(name, TensorData(data.images[chosen], data.labels[chosen]))


def motions(**method: Any) -> tuple[float, float]:
    """Return how far any offset value has moved after three rounds, at a one-class and at a many-class client."""
    defaults = {"name": "distrans", "offset_aggregation": "none", "offset_optimizer": "adam", "offset_lr": 0.015}
    clients = [one_class("alone"), site("mixed", digits())]
    simulation = Simulation(plan_for(defaults | method, preset="paper"), clients)
    for _ in range(3):
        simulation.run_round()
    alone, mixed = (float((c.private["offset"] - c.private["initial_offset"]).abs().max()) for c in clients)
    return alone, mixed


@pytest.mark.parametrize("rule", ["alternating", "joint"])
def test_offset_of_a_client_with_one_class_stays_within_the_bound(rule: str) -> None:
    alone, mixed = motions(offset_bound=BOUND, update_rule=rule)
    assert alone == pytest.approx(BOUND, abs=1e-6)
    assert mixed > 2 * BOUND


def test_all_clients_can_be_bounded() -> None:
    assert motions(offset_bound=BOUND, bounded_clients="all") == pytest.approx((BOUND, BOUND), abs=1e-6)


@pytest.mark.parametrize("method", [{}, {"offset_bound": BOUND, "bounded_clients": "none"}])
def test_offsets_move_freely_without_a_bound(method: dict[str, Any]) -> None:
    assert min(motions(**method)) > 2 * BOUND


def test_aggregated_offset_is_bounded_around_the_one_received() -> None:
    clients = [one_class("alone"), one_class("other")]
    method = {"name": "distrans", "offset_aggregation": "mean", "offset_optimizer": "adam", "offset_lr": 1.0}
    simulation = Simulation(plan_for(method | {"offset_bound": BOUND}), clients)
    simulation.run_round()
    sent = simulation.task(clients[0]).personal["offset"]
    simulation.run_round()
    moved = (clients[0].private["offset"] - sent).abs()
    torch.testing.assert_close(moved.max(), torch.tensor(BOUND), atol=1e-6, rtol=0)


def test_bound_stays_around_the_last_received_offset_when_aggregation_ends() -> None:
    """A new site can raise DH above the threshold. A bound around the very first offset would pull it back."""
    clients = [one_class("alone"), one_class("other")]
    method = {"name": "distrans", "offset_aggregation": "mean", "offset_optimizer": "adam", "offset_lr": 0.015}
    options = method | {"offset_bound": BOUND}
    aggregated = Simulation(plan_for(options), clients)
    for _ in range(3):
        aggregated.run_round()
    before = clients[0].private
    centre = before["bound_centre"]
    assert float((centre - before["initial_offset"]).abs().max()) > BOUND
    alone = Simulation(plan_for(options | {"offset_aggregation": "none"}), clients)
    alone.run_round()
    after = clients[0].private["offset"]
    torch.testing.assert_close((after - centre).abs().max(), torch.tensor(BOUND), atol=1e-6, rtol=0)
