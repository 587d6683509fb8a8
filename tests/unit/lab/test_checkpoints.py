"""Sampling, checkpoints and the controls of a simulation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import NORMED
from torch import Tensor

from lab.checkpoints import Checkpoint, CheckpointBroken
from lab.controls import Scores, score
from lab.datasets import DataSettings, make_indexed_clients, open_set
from lab.datasets.registry import known
from lab.simulation import SimulatedClient, Simulation
from server.core.sampling import choose_participants
from shared.heterogeneity import paper_shares
from shared.methods import METHODS, client_half, server_half
from shared.methods.base import RoundTask, Workplace
from shared.plan import FederationPlan, validate_plan
from shared.summation import RunningMean

SETTINGS = DataSettings(name="digits", train_per_class=24, test_per_class=8)


def plan_of(method: str = "distrans", **changes: Any) -> FederationPlan:
    options: dict[str, Any] = {"name": method}
    if method == "distrans":
        options |= {"offset_optimizer": "adam", "generator": {"width": 16, "hidden": 8}}
    return validate_plan(
        {
            "name": "digits",
            "classes": [str(digit) for digit in range(10)],
            "image": known("digits").image.model_dump(),
            "method": options | changes.pop("method_options", {}),
            "training": {"lr": 0.1, "batch_size": 16},
            "rounds": {"count": 4, "sample_fraction": 0.5},
            **changes,
        }
    )


def sites(each: int = 4, clients: int = 5) -> list[SimulatedClient]:
    images = open_set(SETTINGS, known("digits").image, Path("unused"))
    return make_indexed_clients(images, paper_shares(10, clients, each, seed=0), seed=0)


def everything(simulation: Simulation) -> dict[str, Tensor]:
    kept = {f"{c.record.id} {name}": value for c in simulation.clients for name, value in c.private.items()}
    return {**simulation.state.shared, **simulation.state.private, **kept}


def assert_same(one: Simulation, other: Simulation) -> None:
    assert one.round == other.round
    found, expected = everything(one), everything(other)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_sampled_round_is_the_plain_loop_over_the_coordinators_choice() -> None:
    plan = plan_of(method_options={"offset_aggregation": "network"})
    simulation = Simulation(plan, sites())
    server, half, clients = server_half(plan), client_half(plan), {c.record.id: c for c in sites()}
    roster = [client.record for client in clients.values()]
    facts, state = server.facts(roster), server.initial_state()
    for number in (1, 2, 3):
        chosen = choose_participants(clients, 0.5, plan.seed, number)
        assert len(chosen) == 3
        mean, uploads = RunningMean(), []
        for name in chosen:
            client = clients[name]
            personal = server.personal(state, client.record, roster, facts)
            task = RoundTask(name, number, state.shared, personal, facts)
            update, client.private = half.train(task, client.private, Workplace(client.train))
            server.fold(mean, update.shared, client.record)
            uploads.append((client.record, update.personal))
        state = server.finish(state, mean.result(), uploads, roster, facts)
        outcome = simulation.run_round()
        assert sorted(outcome.reports) == chosen
        assert outcome.evaluations.keys() == clients.keys()
        if number == 1:  # the others hold nothing yet
            assert [client.record.id for client in simulation.clients if client.private] == chosen
    by_hand = Simulation(plan, list(clients.values()))
    by_hand.state, by_hand.round = state, 3
    assert_same(simulation, by_hand)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_simulation_goes_on_from_its_checkpoint_with_the_same_bits(method: str, tmp_path: Path) -> None:
    plan = plan_of(method)
    shape = (1, 10) if method == "fedaws" else (4, 5)  # FedAwS is for clients with one class
    straight = Simulation(plan, sites(*shape))
    for _ in range(4):
        straight.run_round(evaluate=False)
    stopped = Simulation(plan, sites(*shape))
    for number in range(2):
        stopped.run_round(evaluate=False)
        Checkpoint(tmp_path).save(stopped, {"curve": [number]})
    resumed = Simulation(plan, sites(*shape))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.restore(resumed) == {"curve": [1]}
    assert_same(resumed, stopped)
    for _ in range(2):
        resumed.run_round(evaluate=False)
        checkpoint.save(resumed)
    assert_same(resumed, straight)
    assert resumed.evaluate() == straight.evaluate()
    named = json.loads((tmp_path / "checkpoint.json").read_text())
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert files == {named["server"], *named["clients"].values()}


def test_only_tensors_that_changed_are_written_again(tmp_path: Path) -> None:
    simulation, checkpoint = Simulation(plan_of(), sites()), Checkpoint(tmp_path)
    simulation.run_round(evaluate=False)
    checkpoint.save(simulation)
    first = {file.name for file in tmp_path.glob("site-*")}
    assert len(first) == 3
    trained = {client.record.id for client in simulation.participants()}
    simulation.run_round(evaluate=False)
    checkpoint.save(simulation)
    kept = {file.name for file in tmp_path.glob("site-*-1.safetensors")}
    assert kept == {name for name in first if name.removesuffix("-1.safetensors") not in trained}


def test_no_checkpoint_is_none_and_a_broken_or_foreign_one_is_said(tmp_path: Path) -> None:
    simulation = Simulation(plan_of(), sites())
    assert Checkpoint(tmp_path / "none").restore(simulation) is None
    Checkpoint(tmp_path).save(simulation)
    with pytest.raises(CheckpointBroken, match="another simulation"):
        Checkpoint(tmp_path).restore(Simulation(plan_of(model={"dense_dim": 7}), sites()))
    whole = json.loads((tmp_path / "checkpoint.json").read_text())
    for name in whole:
        (tmp_path / "checkpoint.json").write_text(json.dumps({key: whole[key] for key in whole if key != name}))
        assert not Checkpoint(tmp_path).is_there()
        with pytest.raises(CheckpointBroken, match=f"no usable checkpoint: .*{name}"):
            Checkpoint(tmp_path).restore(simulation)
    (tmp_path / "checkpoint.json").write_text(json.dumps(whole))
    assert Checkpoint(tmp_path).is_there()
    (tmp_path / "server-0.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointBroken, match="no usable checkpoint"):
        Checkpoint(tmp_path).restore(simulation)


class TestControls:
    def test_add_up_over_clients_and_leave_the_plain_score_as_it_is(self) -> None:
        simulation = Simulation(plan_of("fedavg"), sites())
        simulation.run_round(evaluate=False)
        scores = score(simulation)
        assert {name: value.plain for name, value in scores.items()} == simulation.evaluate()
        pooled = sum(scores.values(), Scores())
        assert pooled.plain.samples == pooled.masked.samples == pooled.reweighted.samples > 0
        assert pooled.masked.correct > pooled.plain.correct  # an untrained net that is told which four of ten classes

    def test_a_mask_leaves_own_classes_only_and_a_weight_favours_the_frequent_ones(self) -> None:
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

    def test_a_foreign_offset_is_the_next_clients(self) -> None:
        simulation = Simulation(plan_of(method_options={"offset_lr": 1.0}, rounds={"count": 1}), sites())
        simulation.run_round(evaluate=False)
        scores = score(simulation)
        own = [client.private["offset"] for client in simulation.clients]
        for client, offset in zip(simulation.clients, [*own[1:], own[0]], strict=True):
            client.private["offset"] = offset
        assert {name: value.foreign for name, value in scores.items()} == simulation.evaluate()
        assert any(value.foreign != value.plain for value in scores.values())

    def test_a_foreign_offset_comes_without_what_else_its_client_keeps(self) -> None:
        """All offsets are equal, so that a foreign one changes nothing; BatchNorm's private statistics are not."""
        options = {"offset_lr": 0.0, "shared_offset": True, "batchnorm_statistics": "private"}
        tried = plan_of(method_options=options, rounds={"count": 1}, model={"backbone": NORMED})
        simulation = Simulation(tried, sites())
        simulation.run_round(evaluate=False)
        assert all(value.foreign == value.plain for value in score(simulation).values())

    def test_an_offset_that_was_sent_is_replaced_too(self) -> None:
        tried = plan_of(method_options={"offset_aggregation": "network"}, rounds={"count": 1})
        simulation = Simulation(tried, sites())
        simulation.run_round(evaluate=False)
        assert any(value.foreign != value.plain for value in score(simulation).values())

    def test_pfedme_is_measured_by_both_of_its_models(self) -> None:
        scores, others = [], []
        for choice in ("personal", "local-copy"):
            simulation = Simulation(plan_of("pfedme", method_options={"predict": choice}), sites())
            simulation.run_round(evaluate=False)
            found = score(simulation).values()
            scores.append([value.plain for value in found])
            others.append([value.alternative for value in found])
        assert scores == others[::-1]
        assert scores[0] != scores[1]

    @pytest.mark.parametrize(("method", "clients"), [("fedavg", 5), ("distrans", 1)])
    def test_there_is_no_foreign_offset_without_offsets_or_without_others(self, method: str, clients: int) -> None:
        scores = score(Simulation(plan_of(method), sites(10, clients)))
        assert all(value.foreign.samples == 0 for value in scores.values())
