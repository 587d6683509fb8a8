"""Simulated rounds against a plain loop with a running mean, for every method."""

import pytest
from support.few_digits import assert_same, plan_of, sites
from support.halves import server_half

from lab.simulation.simulation import Simulation
from server.core.sampling import choose_participants
from shared.learning.methods import METHODS, client_half
from shared.learning.methods.base import RoundContext, RoundTask, TrainingContext
from shared.tensors.mean import RunningMean


@pytest.mark.parametrize("method", list(METHODS))
def test_sampled_round_is_the_plain_loop_over_the_coordinators_choice(method: str) -> None:
    options = {"offset_aggregation": "network"} if method == "distrans" else {}
    plan = plan_of(method, method_options=options, averaging="samples")
    shape = (1, 10) if method == "fedaws" else (4, 5)  # FedAwS is for clients with one class
    simulation = Simulation(plan, sites(*shape))
    server, half, clients = server_half(plan), client_half(plan), {c.record.id: c for c in sites(*shape)}
    roster = [client.record for client in clients.values()]
    facts, state = server.facts(roster), server.initial_state()
    for number in (1, 2, 3):
        chosen = choose_participants(clients, 0.5, plan.seed, number)
        assert len(chosen) == (shape[1] + 1) // 2
        mean, uploads = RunningMean(), []
        for name in chosen:
            client = clients[name]
            personal = server.personal(state, client.record, RoundContext(roster, facts))
            task = RoundTask(name, number, state.shared, personal, facts)
            update, client.private = half.train(task, client.private, TrainingContext(client.train))
            server.fold(mean, update.shared, client.record)
            uploads.append((client.record, update.personal))
        state = server.finish(state, mean.result(), uploads, RoundContext(roster, facts))
        outcome = simulation.run_round()
        assert sorted(outcome.reports) == chosen
        if number == 1 and method == "distrans":  # the others hold nothing yet
            assert [client.record.id for client in simulation.clients if client.private] == chosen
    by_hand = Simulation(plan, list(clients.values()))
    by_hand.state, by_hand.round = state, 3
    assert_same(simulation, by_hand)
