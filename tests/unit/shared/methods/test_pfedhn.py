import logging

import pytest
import torch
from support.tiny import NORMED, Tensors, assert_equal, digits, first_task, plan_for, site
from torch import nn

from lab.simulation import Simulation
from shared.methods import client_half, server_half
from shared.methods.base import Workplace
from shared.methods.local import make_sgd, mean_loss
from shared.model import build_single
from shared.problems import PlanError, WeightsError
from shared.runtime import Runtime
from shared.seeds import derive_seed

SMALL = {"hidden": 8, "hidden_layers": 1}
WHOLE, PC = {"name": "pfedhn", **SMALL}, {"name": "pfedhn-pc", **SMALL}
MOMENTUM = {"momentum": 0.9, "weight_decay": 5e-5}


def model_of(personal: Tensors) -> Tensors:
    return {name.removeprefix("model."): value for name, value in personal.items()}


def test_delta_is_before_minus_after() -> None:
    plan, client = plan_for(WHOLE, training=MOMENTUM), site("a", digits(8))
    task = first_task(plan, client)
    update, private = client_half(plan).train(task, {}, Workplace(client.train))
    assert (update.shared, private) == ({}, {})
    net = build_single(plan)
    net.load_state_dict(model_of(task.personal))
    (batch,) = client.train.batches(8, seed=0)
    mean_loss(net(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 50)
    for name, parameter in net.named_parameters():
        decayed = parameter.grad + 5e-5 * parameter.detach()
        torch.testing.assert_close(update.personal[f"delta.{name}"], 0.05 * decayed, rtol=1e-3, atol=1e-6)


def test_each_client_has_its_own_model_and_predicts_with_it_as_it_was_made() -> None:
    plan = plan_for(WHOLE)
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    simulation.run_round(evaluate=False)
    images, answers = digits(8).images, []
    for client in simulation.clients:
        task = simulation.task(client)
        net = build_single(plan).eval()
        net.load_state_dict(model_of(task.personal))
        answers.append(simulation.client.predictor(task, client.private, Runtime())(images))
        assert torch.equal(answers[-1], net(images))
    assert not torch.equal(*answers)


def test_the_head_never_leaves_the_agent_and_is_what_it_predicts_with() -> None:
    plan = plan_for(PC, training=MOMENTUM)
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    task = simulation.task(simulation.clients[0])
    update, private = simulation.client.train(task, {}, Workplace(simulation.clients[0].train))
    for sent in (task.personal, task.shared, update.personal, update.shared, simulation.state.private):
        assert not any("logits" in name for name in sent)
    assert private.keys() == {f"{kind}.logits.{part}" for kind in ("head", "momentum") for part in ("weight", "bias")}
    net = build_single(plan).eval()
    net.load_state_dict(
        model_of(task.personal) | {f"logits.{p}": private[f"head.logits.{p}"] for p in ("weight", "bias")}
    )
    found = simulation.client.predictor(task, private, Runtime())(digits(8).images)
    assert torch.equal(found, net(digits(8).images))


def test_the_head_s_momentum_goes_on_where_it_was() -> None:
    """Two rounds on one model are one optimiser's two steps for the head, and two optimisers' for the rest."""
    plan, client = plan_for(PC, training=MOMENTUM), site("a", digits(8))
    half, task = client_half(plan), first_task(plan, client)
    _, first = half.train(task, {}, Workplace(client.train))
    _, second = half.train(task, first, Workplace(client.train))
    _, forgetful = half.train(
        task, {name: value for name, value in first.items() if name.startswith("head.")}, Workplace(client.train)
    )
    velocity = (first["head.logits.weight"] - second["head.logits.weight"]) / 0.05
    torch.testing.assert_close(velocity, second["momentum.logits.weight"], rtol=1e-3, atol=1e-5)
    new_gradient = forgetful["momentum.logits.weight"]
    expected = 0.9 * first["momentum.logits.weight"] + new_gradient
    torch.testing.assert_close(second["momentum.logits.weight"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [WHOLE, PC], ids=["pfedhn", "pfedhn-pc"])
def test_without_rates_nothing_changes(method: dict[str, object]) -> None:
    plan = plan_for({**method, "lr": 0.0, "embedding_dim": 2}, training={"lr": 0.0})
    simulation = Simulation(plan, [site("a", digits(8)), site("b", digits(8, 8))])
    first = simulation.task(simulation.clients[0])
    simulation.run_round(evaluate=False)
    kept = dict(simulation.clients[0].private)
    assert_equal(simulation.task(simulation.clients[0]).personal, first.personal)
    simulation.run_round(evaluate=False)
    assert_equal(
        {name: value for name, value in simulation.clients[0].private.items() if name.startswith("head.")},
        {name: value for name, value in kept.items() if name.startswith("head.")},
    )


def test_batchnorm_s_buffers_are_the_client_s_own() -> None:
    simulation = Simulation(plan_for(WHOLE, NORMED), [site("a", digits()), site("b", digits(16, 24))])
    assert len(simulation.state.shared) == 3
    simulation.run_round(evaluate=False)
    simulation.run_round(evaluate=False)
    counters = [client.private["buffers.backbone.1.num_batches_tracked"].item() for client in simulation.clients]
    assert counters == [6, 4]
    assert simulation.state.shared["backbone.1.num_batches_tracked"].item() == 0


def test_clipping_is_of_the_made_parameters_only() -> None:
    client = site("a", digits(8))
    tight, loose = plan_for({**PC, "clip_norm": 1e-6}), plan_for(PC)
    task = first_task(loose, client)
    clipped, own = client_half(tight).train(task, {}, Workplace(client.train))
    free, same = client_half(loose).train(task, {}, Workplace(client.train))
    assert all(float(value.abs().max()) <= 1e-7 for value in clipped.personal.values())
    assert any(float(value.abs().max()) > 1e-5 for value in free.personal.values())
    assert_equal(own, same)


def test_inner_steps_take_the_first_batch_of_new_shuffles() -> None:
    plan, client = plan_for({**WHOLE, "inner_steps": 5}), site("a", digits())
    task = first_task(plan, client)
    update, _ = client_half(plan).train(task, {}, Workplace(client.train))
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


def test_the_authors_network_on_64_by_64_images() -> None:
    """674,142 parameters for 10 classes, which take 68 million at the coordinator."""
    image = {"channels": 3, "height": 64, "width": 64}
    server = server_half(plan_for({"name": "pfedhn"}, "cnn", classes=list("0123456789"), image=image))
    assert server.update_spec({}).data_bytes == 4 * 674_142
    assert server.hypernetwork.head_bytes == 4 * 68_088_342


def test_a_lost_head_starts_anew_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_for(PC)
    simulation = Simulation(plan, [site("a", digits(8))])
    with caplog.at_level(logging.INFO):
        simulation.run_round(evaluate=False)
        assert not caplog.records
        simulation.clients[0].private = {}
        simulation.run_round(evaluate=False)
    assert "starts from a new one" in caplog.text


def test_what_a_hypernetwork_cannot_do_is_refused_with_words() -> None:
    with pytest.raises(WeightsError, match="cannot start from given weights"):
        server_half(plan_for(WHOLE)).initial_state({"x": torch.zeros(1)})
    image, classes = {"channels": 3, "height": 64, "width": 64}, list("0123456789")
    for backbone, size in (("alexnet", r"24\.7"), ("resnet18", r"4\.5")):
        big = plan_for({"name": "pfedhn"}, backbone, image=image, classes=classes)
        with pytest.raises(PlanError, match=rf"has {size} GB of weights.*smaller backbone"):
            server_half(big).initial_state()


@pytest.mark.parametrize("method", [WHOLE, PC], ids=["pfedhn", "pfedhn-pc"])
def test_it_learns(method: dict[str, object]) -> None:
    plan = plan_for({**method, "hidden": 32, "lr": 0.01}, training={"lr": 0.05, "epochs": 2})
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    losses = [simulation.run_round(evaluate=False).reports["a"].loss for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]
