from dataclasses import replace

import pytest
import torch
from support.compression import OPTIONS
from support.tensors import assert_same_tensors
from support.tiny import METHOD_CASES, NORMED, digits, method_plan, plan_for, sites

from lab.simulation.simulation import Simulation
from shared.contract.errors import WireError
from shared.contract.plan import FederationPlan, UpdateCompression
from shared.learning.methods import client_half
from shared.learning.methods.base import ClientHalf, RoundTask, TrainingContext, Update
from shared.learning.residuals import train_round, without_residual
from shared.tensors.arrays import as_arrays, as_tensors
from shared.tensors.names import Tensors
from shared.tensors.wire import decode

every_option = pytest.mark.parametrize("option", OPTIONS)


def compressed(plan: FederationPlan, option: UpdateCompression) -> FederationPlan:
    return plan.model_copy(update={"training": plan.training.model_copy(update={"update_compression": option})})


def fedavg(option: UpdateCompression = "int8") -> Simulation:
    return Simulation(compressed(plan_for({"name": "fedavg"}), option), sites(2))


def train(simulation: Simulation, kept: Tensors, **task: int) -> tuple[Update, Tensors]:
    client = simulation.clients[0]
    return train_round(simulation.client, replace(simulation.task(client), **task), kept, TrainingContext(client.train))


def is_empty(residual: Tensors) -> bool:
    return not any(bool(value.any()) for name, value in residual.items() if name.startswith("residual."))


@every_option
@pytest.mark.parametrize("name", [name for name in METHOD_CASES if not name.startswith("pfedhn")])
def test_every_method_runs_compressed_and_sends_what_the_coordinator_expects(
    name: str, option: UpdateCompression
) -> None:
    simulation = Simulation(compressed(method_plan(METHOD_CASES[name], NORMED), option), sites(2))
    for _ in range(2):
        task = simulation.task(simulation.clients[0])
        update, _ = train(simulation, simulation.clients[0].private)
        decode(update.encode(), simulation.server.half.upload_spec(task.facts))
        restored = as_tensors(simulation.server.half.received(update.shared, as_arrays(task.shared)))
        spec = simulation.server.half.update_spec(task.facts)
        decode(replace(update, shared=restored).encode(), spec)
        simulation.run_round()
    plain = Simulation(method_plan(METHOD_CASES[name], NORMED), sites(2))
    plain.run_round()
    plain.run_round()
    for tensor, expected in plain.state.shared.items():
        assert torch.allclose(simulation.state.shared[tensor].float(), expected.float(), atol=0.1), tensor


def test_without_compression_nothing_is_kept() -> None:
    simulation = fedavg("none")
    update, kept = train(simulation, {})
    assert kept == {}
    assert all(value.dtype == torch.float32 for value in update.shared.values())


def test_the_residual_is_sent_with_the_next_update_to_the_bit_every_time() -> None:
    simulation = fedavg()
    _, kept = train(simulation, {})
    assert not is_empty(kept)
    simulation.run_round()
    with_residual, without = train(simulation, kept)[0], train(simulation, {})[0]
    assert_same_tensors(train(simulation, kept)[0].shared, with_residual.shared)
    differing = [name for name, value in with_residual.shared.items() if not torch.equal(value, without.shared[name])]
    assert differing


@pytest.mark.parametrize(("model_round", "counts"), [(3, True), (4, True), (2, False), (0, False)])
def test_a_residual_counts_only_for_models_that_contain_its_update(model_round: int, counts: bool) -> None:
    """After a rollback or a failed round, the model is older than the update that the residual belongs to."""
    simulation = fedavg()
    _, kept = train(simulation, {}, round=3)
    update, _ = train(simulation, kept, round=5, model_round=model_round)
    fresh, _ = train(simulation, {}, round=5, model_round=model_round)
    is_same = all(torch.equal(value, fresh.shared[name]) for name, value in update.shared.items())
    assert is_same is not counts


def test_methods_never_see_the_residual() -> None:
    class Looking(type(client_half(plan_for({"name": "fedavg"})))):  # type: ignore[misc]
        def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
            assert private.keys() <= {"own"}
            update, _ = super().train(task, private, context)
            return update, {"own": torch.ones(1)}

    simulation = fedavg()
    simulation.client = half = Looking(simulation.plan)
    assert isinstance(half, ClientHalf)
    kept: Tensors = {}
    for _ in range(3):
        _, kept = train(simulation, kept)
        assert without_residual(kept).keys() == {"own"}


def test_a_diverged_update_is_refused_before_it_is_sent() -> None:
    plan = compressed(plan_for({"name": "fedavg"}, training={"lr": 0.0}), "int8")
    simulation = Simulation(plan, sites(1))
    broken = dict(simulation.state.shared)
    name = next(name for name, value in broken.items() if value.dim() > 1)
    task = replace(simulation.task(simulation.clients[0]), shared=broken)
    _, kept = train_round(simulation.client, task, {}, TrainingContext(digits()))
    kept[f"residual.{name}"].fill_(float("inf"))
    with pytest.raises(WireError, match=f"'{name}' contains a value that is not finite"):
        train_round(simulation.client, replace(task, round=2), kept, TrainingContext(digits()))
