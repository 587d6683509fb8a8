import logging

import pytest
import torch
from support.halves import server_half
from support.tensors import assert_same_tensors
from support.tiny import NORMED, digits, first_task, plan_for, site
from torch import nn

from lab.simulation.simulation import Simulation
from shared.contract.errors import PlanError, WeightsError
from shared.contract.seeds import derive_seed
from shared.learning.methods import client_half
from shared.learning.methods.base import TrainingContext
from shared.learning.methods.training_loop import make_sgd, mean_loss
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors

SMALL = {"hidden": 8, "hidden_layers": 1}
WHOLE, PC = {"name": "pfedhn", **SMALL}, {"name": "pfedhn-pc", **SMALL}
MOMENTUM = {"momentum": 0.9, "weight_decay": 5e-5}


def model_of(personal: Tensors) -> Tensors:
    return {name.removeprefix("model."): value for name, value in personal.items()}


def test_delta_is_before_minus_after() -> None:
    plan, client = plan_for(WHOLE, training=MOMENTUM), site("a", digits(8))
    task = first_task(plan, client)
    update, private = client_half(plan).train(task, {}, TrainingContext(client.train))
    assert (update.shared, private) == ({}, {})
    net = build_single(plan)
    net.load_state_dict(model_of(task.personal))
    (batch,) = client.train.batches(8, seed=0)
    mean_loss(net(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 50)
    for name, parameter in net.named_parameters():
        decayed = parameter.grad + 5e-5 * parameter.detach()
        torch.testing.assert_close(update.personal[f"delta.{name}"], 0.05 * decayed, rtol=1e-3, atol=1e-6)


def test_each_client_predicts_with_its_own_generated_model() -> None:
    plan = plan_for(WHOLE)
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    simulation.run_round()
    images, answers = digits(8).images, []
    for client in simulation.clients:
        task = simulation.task(client)
        net = build_single(plan).eval()
        net.load_state_dict(model_of(task.personal))
        answers.append(simulation.client.predictor(task, client.private, Runtime())(images))
        assert torch.equal(answers[-1], net(images))
    assert not torch.equal(*answers)


def test_head_never_leaves_the_agent_and_is_used_for_prediction() -> None:
    plan = plan_for(PC, training=MOMENTUM)
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    task = simulation.task(simulation.clients[0])
    update, private = simulation.client.train(task, {}, TrainingContext(simulation.clients[0].train))
    for sent in (task.personal, task.shared, update.personal, update.shared, simulation.state.private):
        assert not any("logits" in name for name in sent)
    assert private.keys() == {f"{kind}.logits.{part}" for kind in ("head", "momentum") for part in ("weight", "bias")}
    net = build_single(plan).eval()
    net.load_state_dict(
        model_of(task.personal) | {f"logits.{p}": private[f"head.logits.{p}"] for p in ("weight", "bias")}
    )
    found = simulation.client.predictor(task, private, Runtime())(digits(8).images)
    assert torch.equal(found, net(digits(8).images))


def test_head_s_momentum_carries_over_between_rounds() -> None:
    """Over two rounds on one model, the head has one optimizer and the rest a new one in each round."""
    plan, client = plan_for(PC, training=MOMENTUM), site("a", digits(8))
    half, task = client_half(plan), first_task(plan, client)
    _, first = half.train(task, {}, TrainingContext(client.train))
    _, second = half.train(task, first, TrainingContext(client.train))
    _, forgetful = half.train(
        task, {name: value for name, value in first.items() if name.startswith("head.")}, TrainingContext(client.train)
    )
    velocity = (first["head.logits.weight"] - second["head.logits.weight"]) / 0.05
    torch.testing.assert_close(velocity, second["momentum.logits.weight"], rtol=1e-3, atol=1e-5)
    new_gradient = forgetful["momentum.logits.weight"]
    expected = 0.9 * first["momentum.logits.weight"] + new_gradient
    torch.testing.assert_close(second["momentum.logits.weight"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [WHOLE, PC], ids=["pfedhn", "pfedhn-pc"])
def test_zero_learning_rates_change_nothing(method: dict[str, object]) -> None:
    plan = plan_for({**method, "lr": 0.0, "embedding_dim": 2}, training={"lr": 0.0})
    simulation = Simulation(plan, [site("a", digits(8)), site("b", digits(8, 8))])
    first = simulation.task(simulation.clients[0])
    simulation.run_round()
    kept = dict(simulation.clients[0].private)
    assert_same_tensors(simulation.task(simulation.clients[0]).personal, first.personal)
    simulation.run_round()
    assert_same_tensors(
        {name: value for name, value in simulation.clients[0].private.items() if name.startswith("head.")},
        {name: value for name, value in kept.items() if name.startswith("head.")},
    )


def test_batchnorm_buffers_stay_at_the_client() -> None:
    simulation = Simulation(plan_for(WHOLE, NORMED), [site("a", digits()), site("b", digits(16, 24))])
    assert len(simulation.state.shared) == 3
    simulation.run_round()
    simulation.run_round()
    counters = [client.private["buffers.backbone.1.num_batches_tracked"].item() for client in simulation.clients]
    assert counters == [6, 4]
    assert simulation.state.shared["backbone.1.num_batches_tracked"].item() == 0


def test_clipping_applies_to_generated_parameters_only() -> None:
    client = site("a", digits(8))
    tight, loose = plan_for({**PC, "clip_norm": 1e-6}), plan_for(PC)
    task = first_task(loose, client)
    clipped, own = client_half(tight).train(task, {}, TrainingContext(client.train))
    free, same = client_half(loose).train(task, {}, TrainingContext(client.train))
    assert all(float(value.abs().max()) <= 1e-7 for value in clipped.personal.values())
    assert any(float(value.abs().max()) > 1e-5 for value in free.personal.values())
    assert_same_tensors(own, same)


def test_each_inner_step_uses_the_first_batch_of_a_new_shuffle() -> None:
    plan, client = plan_for({**WHOLE, "inner_steps": 5}), site("a", digits())
    task = first_task(plan, client)
    update, _ = client_half(plan).train(task, {}, TrainingContext(client.train))
    assert update.report.batches == 5
    net = build_single(plan)
    net.load_state_dict(model_of(task.personal))
    optimizer = make_sgd(net, plan.training)
    for shuffle in range(5):
        x, y = next(client.train.batches(8, derive_seed(plan.seed, "batches", "a", 1, shuffle)))
        optimizer.zero_grad()
        mean_loss(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 50)
        optimizer.step()
    trained = {name: value - update.personal[f"delta.{name}"] for name, value in model_of(task.personal).items()}
    torch.testing.assert_close(trained, dict(net.state_dict()), rtol=1e-4, atol=1e-6)


def test_authors_network_has_their_size_on_64_by_64_images() -> None:
    """674,142 parameters for 10 classes, generated by 68 million at the coordinator."""
    image = {"channels": 3, "height": 64, "width": 64}
    server = server_half(plan_for({"name": "pfedhn"}, "cnn", classes=list("0123456789"), image=image))
    assert server.update_spec({}).data_bytes == 4 * 674_142
    assert server.hypernetwork.head_bytes == 4 * 68_088_342


def test_lost_head_is_replaced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_for(PC)
    simulation = Simulation(plan, [site("a", digits(8))])
    with caplog.at_level(logging.INFO):
        simulation.run_round()
        assert not caplog.records
        simulation.clients[0].private = {}
        simulation.run_round()
    assert "starting with a new one" in caplog.text


def test_given_weights_and_oversized_hypernetworks_are_refused() -> None:
    with pytest.raises(WeightsError, match="cannot start from given weights"):
        server_half(plan_for(WHOLE)).initial_state({"x": torch.zeros(1)})
    image, classes = {"channels": 3, "height": 64, "width": 64}, list("0123456789")
    for backbone, size in (("alexnet", r"24\.7"), ("resnet18", r"4\.5")):
        big = plan_for({"name": "pfedhn"}, backbone, image=image, classes=classes)
        with pytest.raises(PlanError, match=rf"has {size} GB of weights.*smaller backbone"):
            server_half(big).initial_state()


@pytest.mark.parametrize("method", [WHOLE, PC], ids=["pfedhn", "pfedhn-pc"])
def test_accuracy_improves(method: dict[str, object]) -> None:
    plan = plan_for({**method, "hidden": 32, "lr": 0.01}, training={"lr": 0.05, "epochs": 2})
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    losses = [simulation.run_round().reports["a"].loss for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]
