"""Properties of every method, tested on complete federations in memory."""

from typing import Any

import pytest
import safetensors.torch
import torch
from support.halves import server_half
from support.simulating import evaluate_clients
from support.tensors import assert_same_tensors
from support.tiny import METHOD_CASES, NORMED, digits, method_plan, plan_for, sites

from client_agent.serving.export import StandaloneModel
from lab.simulation.simulation import Simulation
from shared.contract.method_options import METHOD_NAMES
from shared.learning.methods import METHODS
from shared.learning.methods.base import ClientRecord, RoundContext, TrainingContext
from shared.learning.methods.modules import ModulePredictor
from shared.learning.methods.tensor_half import TensorState
from shared.learning.runtime import Runtime
from shared.tensors.arrays import as_tensors
from shared.tensors.names import Tensors
from shared.tensors.spec import Spec
from shared.tensors.wire import decode, digest, encode

every_method = pytest.mark.parametrize("method", METHOD_CASES.values(), ids=METHOD_CASES.keys())
KEEPS_BUFFERS = ("distrans-separate", "distrans-private", "pfedme", "pfedhn-pc", "moon", "advprop", "advprop-private")


def begin(method: dict[str, Any], backbone: str = "lenet") -> Simulation:
    return Simulation(method_plan(method, backbone), sites(3))


def everything(simulation: Simulation) -> Tensors:
    """Return all tensors of a federation, at the coordinator and the clients."""
    kept = {f"{c.record.id} {name}": value for c in simulation.clients for name, value in c.private.items()}
    state = simulation.state
    return {**state.shared, **{f"server {name}": value for name, value in state.private.items()}, **kept}


def stored(tensors: Tensors) -> Tensors:
    """Return the tensors as read back from a database or disk."""
    return safetensors.torch.load(encode(tensors))


def test_every_method_has_a_case() -> None:
    assert {case["name"] for case in METHOD_CASES.values()} == set(METHODS) == set(METHOD_NAMES)


@pytest.mark.parametrize(
    ("method", "backbone"),
    [
        *(pytest.param(case, "lenet", id=name) for name, case in METHOD_CASES.items()),
        *(pytest.param(METHOD_CASES[name], NORMED, id=f"{name}-batchnorm") for name in KEEPS_BUFFERS),
    ],
)
def test_runs_agree_to_the_bit_even_with_a_restart_in_between(method: dict[str, Any], backbone: str) -> None:
    """The coordinator's and agents' state is stored after the first round and loaded by new programs."""
    first, second = begin(method, backbone), begin(method, backbone)
    for simulation in (first, second):
        simulation.run_round()
    restarted = begin(method, backbone)
    restarted.state = TensorState(stored(second.state.shared), stored(second.state.private))
    restarted.round = 1
    for client, before in zip(restarted.clients, second.clients, strict=True):
        client.private = stored(before.private)
    torch.rand(3)  # unrelated random draws
    for simulation in (first, restarted):
        simulation.run_round()
    assert_same_tensors(everything(restarted), everything(first))
    assert evaluate_clients(restarted) == evaluate_clients(first)
    assert digest(encode(everything(first))) != digest(encode(everything(second)))  # one round behind


@every_method
def test_update_matches_its_spec_and_contains_nothing_private(method: dict[str, Any]) -> None:
    simulation = begin(method, NORMED)
    for _ in range(2):
        facts = simulation.server.facts(simulation.roster)
        for client in simulation.clients:
            task = simulation.task(client)
            update, private = simulation.client.train(task, client.private, TrainingContext(client.train))
            sent = as_tensors(decode(update.encode(), simulation.server.half.update_spec(facts))[0])
            named = {f"shared.{name}" for name in update.shared} | {f"personal.{name}" for name in update.personal}
            assert sent.keys() == named
            stored(private)  # plain tensors that share no memory
            for name, value in private.items():
                copies = [key for key, other in sent.items() if _is_copy(value, other)]
                assert not copies or _may_be_sent(method, name), (name, copies)
        simulation.run_round()


def _is_copy(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.shape == other.shape and value.numel() > 1 and len(value.unique()) > 1 and torch.equal(value, other)


def _may_be_sent(method: dict[str, Any], name: str) -> bool:
    """Return whether the method, by definition, also uploads this private tensor."""
    if method["name"] == "distrans" and method["offset_aggregation"] != "none":
        return name == "offset"
    return name.startswith(("previous.", "local_copy."))


def _sends_parameters_only(method: dict[str, Any]) -> bool:
    return method["name"] == "pfedme" or method.get("batchnorm_statistics") == "private"


@pytest.mark.parametrize("backbone", ["lenet", NORMED])
@every_method
def test_coordinator_s_tensors_match_the_specs_agents_expect(method: dict[str, Any], backbone: str) -> None:
    simulation = begin(method, backbone)
    for _ in range(3):
        server, half = simulation.server, simulation.server.half
        facts, state = server.facts(simulation.roster), simulation.state
        assert Spec.of(state.shared) == half.model_spec()
        from_storage = half.stored_update_spec(Spec.of(state.shared), Spec.of(state.private), facts)
        is_network_needed = method["name"].startswith("pfedhn") or (
            backbone == NORMED and _sends_parameters_only(method)
        )
        assert from_storage == (None if is_network_needed else half.update_spec(facts))
        for client in simulation.clients:
            sent = server.personal(simulation.state, client.record, RoundContext(simulation.roster, facts))
            assert Spec.of(sent) in half.personal_specs(facts)
        if simulation.round < 2:
            simulation.run_round()


@every_method
def test_personal_tensors_do_not_depend_on_the_order_of_the_roster(method: dict[str, Any]) -> None:
    server = server_half(method_plan(method))
    state, roster = server.initial_state(), [client.record for client in sites(3)]
    facts = server.facts(roster)
    for record in roster:
        expected = server.personal(TensorState({}, state.private), record, RoundContext(roster, facts))
        assert_same_tensors(server.personal(state, record, RoundContext(roster[::-1], facts)), expected)
        stored(expected)


@every_method
def test_predictions_are_finite_before_and_after_training_and_without_offset(method: dict[str, Any]) -> None:
    simulation, images = begin(method, NORMED), digits(6).images
    late = ClientRecord("late", (0, 4, 0, 0))  # joins after all others have trained
    for _ in range(2):
        for client in simulation.clients:
            task = simulation.task(client)
            for use_offset in (True, False):
                predictor = simulation.client.predictor(task, client.private, Runtime(), use_offset=use_offset)
                logits = predictor(images)
                assert logits.shape == (6, 4)
                assert bool(logits.isfinite().all())
                assert logits.dtype == torch.float32
                alone = torch.cat([predictor(image[None]) for image in images])
                torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5)  # eval mode: images are independent
        simulation.run_round()
    facts = simulation.server.facts(simulation.roster)
    personal = simulation.server.personal(simulation.state, late, RoundContext(simulation.roster, facts))
    task = type(task)(late.id, 3, simulation.state.shared, personal, facts)
    assert bool(simulation.client.predictor(task, {}, Runtime())(images).isfinite().all())


@every_method
def test_predictor_can_be_exported_as_one_module(method: dict[str, Any]) -> None:
    simulation = begin(method)
    client, images = simulation.clients[0], digits(4).images
    predictor = simulation.client.predictor(simulation.task(client), client.private, Runtime())
    assert isinstance(predictor, ModulePredictor)
    image = simulation.plan.image
    pixels = images * image.std[0] + image.mean[0]
    torch.testing.assert_close(StandaloneModel(predictor, image.mean, image.std)(pixels), predictor(images))


@every_method
def test_training_does_not_modify_its_arguments(method: dict[str, Any]) -> None:
    simulation = begin(method, NORMED)
    simulation.run_round()
    client = simulation.clients[0]
    task = simulation.task(client)
    before = stored(task.shared), stored(task.personal), stored(client.private), stored(simulation.state.private)
    simulation.client.train(task, client.private, TrainingContext(client.train))
    simulation.server.personal(simulation.state, client.record, RoundContext(simulation.roster, task.facts))
    after = task.shared, task.personal, client.private, simulation.state.private
    for found, expected in zip(after, before, strict=True):
        assert_same_tensors(found, expected)


@every_method
def test_half_refuses_the_plan_of_another_method(method: dict[str, Any]) -> None:
    other = plan_for({"name": "moon"} if method["name"] != "moon" else {"name": "pfedme"})
    half = METHODS[method["name"]]
    if method["name"] == "fedavg":  # accepts any plan; the site's own baseline relies on it
        return
    with pytest.raises(TypeError, match="this plan is for"):
        half.client(other)
