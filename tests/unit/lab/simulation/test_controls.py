"""The controls that show where a federation's accuracy comes from."""

import pytest
import torch
from support.few_digits import plan_of, sites
from support.simulating import evaluate_clients
from support.tiny import NORMED

from lab.simulation.controls import Scores, score
from lab.simulation.simulation import Simulation


def test_scores_add_up_over_clients_and_leave_the_plain_score_alone() -> None:
    simulation = Simulation(plan_of("fedavg"), sites())
    simulation.run_round()
    scores = score(simulation)
    assert {name: value.plain for name, value in scores.items()} == evaluate_clients(simulation)
    pooled = sum(scores.values(), Scores())
    assert pooled.plain.samples == pooled.masked.samples == pooled.reweighted.samples > 0
    assert pooled.masked.correct > pooled.plain.correct  # an untrained net that now knows which four of ten classes


def test_mask_keeps_own_classes_only_and_weights_favor_frequent_ones() -> None:
    simulation = Simulation(plan_of("fedavg"), sites(each=2))
    zeros = {name: torch.zeros_like(value) for name, value in simulation.state.shared.items()}
    simulation.state = type(simulation.state)(zeros)  # equal logits for every class
    for client in simulation.clients:
        scores = score(simulation)[client.record.id]
        first = min(client.own_classes)
        frequent = max(client.own_classes, key=lambda label: client.record.class_counts[label])
        labels = client.test.labels.tolist()
        assert scores.masked.correct == labels.count(first)
        assert scores.reweighted.correct == labels.count(frequent)


def test_foreign_offset_is_the_next_clients() -> None:
    simulation = Simulation(plan_of(method_options={"offset_lr": 1.0}, rounds={"count": 1}), sites())
    simulation.run_round()
    scores = score(simulation)
    own = [client.private["offset"] for client in simulation.clients]
    for client, offset in zip(simulation.clients, [*own[1:], own[0]], strict=True):
        client.private["offset"] = offset
    assert {name: value.foreign for name, value in scores.items()} == evaluate_clients(simulation)
    assert any(value.foreign != value.plain for value in scores.values())


def test_foreign_offset_comes_without_other_private_tensors() -> None:
    """All offsets are equal, so a foreign one changes nothing; the private BatchNorm statistics differ."""
    options = {"offset_lr": 0.0, "shared_offset": True, "batchnorm_statistics": "private"}
    tried = plan_of(method_options=options, rounds={"count": 1}, model={"backbone": NORMED})
    simulation = Simulation(tried, sites())
    simulation.run_round()
    assert all(value.foreign == value.plain for value in score(simulation).values())


def test_downloaded_offset_is_replaced_too() -> None:
    tried = plan_of(method_options={"offset_aggregation": "network"}, rounds={"count": 1})
    simulation = Simulation(tried, sites())
    simulation.run_round()
    assert any(value.foreign != value.plain for value in score(simulation).values())


def test_pfedme_is_measured_with_both_of_its_models() -> None:
    scores, others = [], []
    for choice in ("personal", "local-copy"):
        simulation = Simulation(plan_of("pfedme", method_options={"predict": choice}), sites())
        simulation.run_round()
        found = score(simulation).values()
        scores.append([value.plain for value in found])
        others.append([value.alternative for value in found])
    assert scores == others[::-1]
    assert scores[0] != scores[1]


@pytest.mark.parametrize(("method", "clients"), [("fedavg", 5), ("distrans", 1)])
def test_no_foreign_offset_without_offsets_or_other_clients(method: str, clients: int) -> None:
    scores = score(Simulation(plan_of(method), sites(10, clients)))
    assert all(value.foreign.samples == 0 for value in scores.values())
