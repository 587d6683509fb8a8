"""Clients that train by themselves."""

from pathlib import Path

import torch
from support.few_digits import assert_same, plan_of, sites
from support.simulating import run_all

from client_agent.serving.baseline import LocalBaseline
from lab.simulation.alone import AloneSimulation
from lab.simulation.controls import Scores, score
from lab.simulation.simulation import Checkpoint
from shared.learning.methods.base import TrainingContext

ALL = {"count": 3}  # rounds with every client


def test_weights_are_those_of_the_agents_baseline_whatever_the_method() -> None:
    alone = AloneSimulation(plan_of("distrans", rounds=ALL), sites())
    run_all(alone)
    client = alone.clients[2]
    baseline, weights = LocalBaseline(plan_of("fedavg", rounds=ALL), client.record.id), {}
    for number in (1, 2, 3):
        weights = baseline.train(weights, number, TrainingContext(client.train))
    assert client.private.keys() == weights.keys()
    assert all(torch.equal(client.private[name], value) for name, value in weights.items())


def test_clients_never_learn_from_each_other() -> None:
    few, many = (AloneSimulation(plan_of("fedavg", rounds=ALL), clients) for clients in (sites()[:1], sites()))
    run_all(few)
    run_all(many)
    mine, among_others = few.clients[0].private, many.clients[0].private
    assert all(torch.equal(mine[name], value) for name, value in among_others.items())


def test_client_trains_in_the_rounds_that_would_choose_it() -> None:
    alone = AloneSimulation(plan_of("fedavg"), sites())  # half of the clients per round
    chosen = [client.record.id for client in alone.participants()]
    outcome = alone.run_round()
    assert sorted(outcome.reports) == sorted(chosen)
    assert [bool(client.private) for client in alone.clients] == [c.record.id in chosen for c in alone.clients]


def test_evaluation_uses_each_clients_own_weights() -> None:
    alone = AloneSimulation(plan_of("fedavg", rounds={"count": 12}), sites())
    run_all(alone)
    pooled = sum(score(alone).values(), Scores())
    assert pooled.plain.accuracy == pooled.masked.accuracy  # it has never seen other classes
    assert pooled.plain.accuracy is not None
    assert pooled.plain.accuracy > 0.6


def test_interrupted_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    straight, stopped, resumed = (AloneSimulation(plan_of("fedavg"), sites()) for _ in range(3))
    run_all(straight)
    stopped.run_round()
    stopped.run_round()
    Checkpoint(tmp_path).save(stopped)
    Checkpoint(tmp_path).restore(resumed)
    run_all(resumed)
    assert_same(resumed, straight)
