"""How far the offset may move from its start, and at whose clients."""

from typing import Any

import pytest
import torch
from support.tiny import digits, plan_for, site

from lab.simulation import SimulatedClient, Simulation
from shared.tensor_data import TensorData

BOUND = 0.02


def one_class(name: str) -> SimulatedClient:
    data = digits(40)
    chosen = data.labels == 1
    return site(name, TensorData(data.images[chosen], data.labels[chosen]))


def motions(**method: Any) -> tuple[float, float]:
    """How far a value of the offset of a one-class and of a many-class client has moved after three rounds at most."""
    defaults = {"name": "distrans", "offset_aggregation": "none", "offset_optimizer": "adam", "offset_lr": 0.015}
    clients = [one_class("alone"), site("mixed", digits())]
    simulation = Simulation(plan_for(defaults | method, preset="paper"), clients)
    for _ in range(3):
        simulation.run_round(evaluate=False)
    alone, mixed = (float((c.private["offset"] - c.private["initial_offset"]).abs().max()) for c in clients)
    return alone, mixed


@pytest.mark.parametrize("rule", ["alternating", "joint"])
def test_a_client_with_one_class_stays_within_the_bound_for_all_rounds(rule: str) -> None:
    alone, mixed = motions(offset_bound=BOUND, update_rule=rule)
    assert alone == pytest.approx(BOUND, abs=1e-6)
    assert mixed > 2 * BOUND


def test_all_clients_can_be_bounded() -> None:
    assert motions(offset_bound=BOUND, bounded_clients="all") == pytest.approx((BOUND, BOUND), abs=1e-6)


@pytest.mark.parametrize("method", [{}, {"offset_bound": BOUND, "bounded_clients": "none"}])
def test_without_a_bound_none_is_held_back(method: dict[str, Any]) -> None:
    assert min(motions(**method)) > 2 * BOUND


def test_an_offset_that_the_coordinator_aggregates_is_bounded_around_what_was_sent() -> None:
    clients = [one_class("alone"), one_class("other")]
    method = {"name": "distrans", "offset_aggregation": "mean", "offset_optimizer": "adam", "offset_lr": 1.0}
    simulation = Simulation(plan_for(method | {"offset_bound": BOUND}), clients)
    simulation.run_round(evaluate=False)
    sent = simulation.task(clients[0]).personal["offset"]
    simulation.run_round(evaluate=False)
    moved = (clients[0].private["offset"] - sent).abs()
    torch.testing.assert_close(moved.max(), torch.tensor(BOUND), atol=1e-6, rtol=0)


def test_when_aggregation_ends_the_bound_stays_around_what_was_sent_last() -> None:
    """A site that joins can bring DH over the threshold. Around the very first offset, the bound would pull it back."""
    clients = [one_class("alone"), one_class("other")]
    method = {"name": "distrans", "offset_aggregation": "mean", "offset_optimizer": "adam", "offset_lr": 0.015}
    options = method | {"offset_bound": BOUND}
    aggregated = Simulation(plan_for(options), clients)
    for _ in range(3):
        aggregated.run_round(evaluate=False)
    before = clients[0].private
    centre = before["bound_centre"]
    assert float((centre - before["initial_offset"]).abs().max()) > BOUND
    alone = Simulation(plan_for(options | {"offset_aggregation": "none"}), clients)
    alone.run_round(evaluate=False)
    after = clients[0].private["offset"]
    torch.testing.assert_close((after - centre).abs().max(), torch.tensor(BOUND), atol=1e-6, rtol=0)
