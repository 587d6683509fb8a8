from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.halves import server_half
from support.tensors import assert_same_tensors, differ
from support.tiny import NORMED, digits, first_task, plan_for, site
from torch import nn

from lab.simulation.simulation import Simulation
from shared.contract.method_options import PFedMeOptions
from shared.contract.seeds import derive_seed
from shared.learning.methods import client_half
from shared.learning.methods.base import RoundContext, TrainingContext
from shared.learning.methods.pfedme import PersonalSGD
from shared.learning.methods.tensor_half import TensorState
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import strip_prefix


def one_batch_on_a_quadratic(
    theta_steps: int, personal_lr: float, decay: float, attraction: float = 15.0, lr: float = 0.005
) -> tuple[float, float]:
    """Return θ and w after one batch, for f = ½ (θ − 3)² and w = 1."""
    options = PFedMeOptions(personal_lr=personal_lr, attraction=attraction, inner_steps=theta_steps, decay=decay)
    theta = nn.Parameter(torch.ones(1, dtype=torch.float64))
    anchor = torch.ones(1, dtype=torch.float64)
    optimizer = PersonalSGD([theta], [anchor], options)
    for _ in range(theta_steps):
        optimizer.zero_grad()
        (0.5 * (theta - 3).square().sum()).backward()
        optimizer.step()
    optimizer.update_anchors(lr)
    return theta.item(), anchor.item()


class TestTheQuadratic:
    """f = ½ (θ − 3)², w = 1, λ = 15, η = 0.005."""

    @pytest.mark.parametrize(
        ("steps", "personal_lr", "decay", "theta", "copy"),
        [
            (5, 0.09, 0.0, 1.1270614528, 1.00952960896),
            (1, 0.09, 1e-3, 1.17991, 1.01349325),
            (400, 0.05, 0.0, 1.125, 1.009375),  # practically exact
        ],
    )
    def test_one_batch_matches_numbers_worked_out_by_hand(
        self, steps: int, personal_lr: float, decay: float, theta: float, copy: float
    ) -> None:
        assert one_batch_on_a_quadratic(steps, personal_lr, decay) == pytest.approx((theta, copy), abs=1e-11)

    def test_strong_attraction_equals_plain_sgd_on_the_model(self) -> None:
        """w' → w − η ∇f(w), here 1 + 2 η."""
        _, copy = one_batch_on_a_quadratic(200, 1e-7, 0.0, attraction=1e6, lr=1e-3)
        assert copy == pytest.approx(1 + 2e-3, abs=1e-6)

    def test_zero_attraction_freezes_the_model_and_trains_the_personal_one_with_plain_sgd(self) -> None:
        theta, copy = one_batch_on_a_quadratic(3, 0.1, 0.0, attraction=0.0)
        assert (theta, copy) == (pytest.approx(3 - 2 * 0.9**3, abs=1e-12), 1.0)


def test_zero_attraction_uploads_the_model_unchanged_and_keeps_a_plainly_trained_one() -> None:
    plan = plan_for({"name": "pfedme", "attraction": 0.0, "decay": 0.0, "inner_steps": 1, "personal_lr": 0.05})
    client = site("a", digits())
    task = first_task(plan, client)
    update, private = client_half(plan).train(task, {}, TrainingContext(client.train))
    assert_same_tensors(update.shared, task.shared)
    plain = plan_for({"name": "fedavg"})
    expected, _ = client_half(plain).train(task, {}, TrainingContext(client.train))
    for name, value in expected.shared.items():
        torch.testing.assert_close(private[f"personal.{name}"], value)


def test_later_round_matches_plain_pytorch() -> None:
    """θ and w_i both start from the round's w, whatever was kept; w_i is updated once per batch, at the plan's rate."""
    plan = plan_for({"name": "pfedme", "inner_steps": 3, "personal_lr": 0.02, "attraction": 4.0, "decay": 0.01})
    client, half = site("a", digits()), client_half(plan)
    task = first_task(plan, client)
    _, kept = half.train(task, {}, TrainingContext(client.train))
    task = replace(task, round=2, shared={name: 1.1 * value for name, value in task.shared.items()})
    update, kept = half.train(task, kept, TrainingContext(client.train))
    net, w = build_single(plan), {name: value.clone() for name, value in task.shared.items()}
    net.load_state_dict(task.shared)
    theta = net.state_dict()
    for x, y in client.train.batches(8, derive_seed(plan.seed, "batches", "a", 2, 0)):
        for _ in range(3):
            gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
            for name, gradient in zip(theta, gradients, strict=True):
                theta[name] -= 0.02 * (gradient + 4 * (theta[name] - w[name]) + 0.01 * theta[name])
        for name in w:
            w[name] -= 0.05 * 4 * (w[name] - theta[name])
    torch.testing.assert_close(update.shared, w, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(strip_prefix(kept, "personal."), dict(theta), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
def test_server_mixes_the_old_model_with_the_mean(beta: float) -> None:
    server = server_half(plan_for({"name": "pfedme", "server_mix": beta}))
    state = TensorState({"w": torch.tensor([1.0]), "running_mean": torch.tensor([7.0])})
    mixed = server.finish(state, {"w": torch.tensor([3.0])}, [], RoundContext([], {}))
    assert mixed.shared["w"].item() == 1 + 2 * beta
    assert mixed.shared["running_mean"].item() == 7  # not averaged: the initial value for every client


def test_client_predicts_with_its_own_model_or_the_global_one_before_it_has_one() -> None:
    plan, data = plan_for({"name": "pfedme"}), digits(8)
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    half, client = simulation.client, simulation.clients[0]

    def logits() -> torch.Tensor:
        return half.predictor(simulation.task(client), client.private, Runtime())(data.images)

    assert torch.equal(logits(), build_single(plan).eval()(data.images))
    simulation.run_round()
    own = build_single(plan).eval()
    own.load_state_dict(strip_prefix(client.private, "personal."))
    assert torch.equal(logits(), own(data.images))
    fresh = half.predictor(simulation.task(client), {}, Runtime())(data.images)  # an agent that lost its state
    assert not torch.equal(logits(), fresh)


def test_prediction_with_the_local_copy_matches_the_published_code() -> None:
    plan = plan_for({"name": "pfedme", "predict": "local-copy"})
    client = site("a", digits())
    task = first_task(plan, client)
    update, private = client_half(plan).train(task, {}, TrainingContext(client.train))
    net = build_single(plan).eval()
    net.load_state_dict(update.shared)
    found = client_half(plan).predictor(task, private, Runtime())(digits(8).images)
    assert torch.equal(found, net(digits(8).images))


def test_alternative_is_the_model_that_does_not_predict() -> None:
    client, images = site("a", digits()), digits(8).images
    personal, local_copy = (
        client_half(plan_for({"name": "pfedme", "predict": choice})) for choice in ("personal", "local-copy")
    )
    task = first_task(personal.plan, client)
    _, private = personal.train(task, {}, TrainingContext(client.train))
    for half, other in ((personal, local_copy), (local_copy, personal)):
        alternative = half.alternative(task, private, Runtime())
        assert alternative is not None
        assert torch.equal(alternative(images), other.predictor(task, private, Runtime())(images))
        assert not torch.equal(alternative(images), half.predictor(task, private, Runtime())(images))


def test_batchnorm_statistics_stay_at_the_client_and_carry_over() -> None:
    plan = plan_for({"name": "pfedme", "inner_steps": 3}, NORMED)
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(16, 24))])
    start = simulation.state.shared
    simulation.run_round()
    counters = [client.private["personal.backbone.1.num_batches_tracked"].item() for client in simulation.clients]
    assert counters == [9, 6]  # three and two batches, each seen three times
    statistics = [name for name in start if "running" in name or "tracked" in name]
    assert len(statistics) == 3
    assert_same_tensors(
        {name: simulation.state.shared[name] for name in statistics}, {name: start[name] for name in statistics}
    )
    simulation.run_round()
    assert simulation.clients[0].private["personal.backbone.1.num_batches_tracked"].item() == 18


def test_local_rounds_count_batches_whatever_the_number_of_images() -> None:
    plan = plan_for({"name": "pfedme", "local_rounds": 5})
    client = site("a", digits())
    update, _ = client_half(plan).train(first_task(plan, client), {}, TrainingContext(client.train))
    assert update.report.batches == 5  # an epoch has three


def test_accuracy_improves() -> None:
    plan = plan_for({"name": "pfedme", "personal_lr": 0.05, "attraction": 5.0}, training={"lr": 0.1})
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    losses = [simulation.run_round().reports["a"].loss for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0]
    loss_of_theta = F.cross_entropy(
        simulation.client.predictor(simulation.task(simulation.clients[0]), simulation.clients[0].private, Runtime())(
            digits().images
        ),
        digits().labels,
    )
    assert float(loss_of_theta) < losses[0]
    assert differ(simulation.state.shared, server_half(plan).initial_state().shared)
