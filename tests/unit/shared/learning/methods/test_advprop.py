from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.halves import server_half
from support.tensors import assert_same_tensors, differ
from support.tiny import CLASSES, NORMED, digits, first_task, plan_for, site
from torch import Tensor, nn

from lab.simulation.simulation import Simulation
from shared.contract.method_options import AdvPropOptions
from shared.contract.plan import ImagePlan
from shared.contract.seeds import derive_seed
from shared.learning.methods import client_half
from shared.learning.methods.advprop import Attack, without_auxiliary
from shared.learning.methods.base import TrainingContext
from shared.learning.methods.training_loop import mean_loss
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import add_prefix, strip_prefix

GREY = ImagePlan(channels=1, height=1, width=2, mean=(0.0,), std=(1.0,))
COLOUR = ImagePlan(channels=3, height=4, width=4, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5))


def train(method: dict[str, Any], backbone: str, private: dict[str, Tensor] | None = None) -> Any:
    plan, client = plan_for(method, backbone), site("a", digits())
    return client_half(plan).train(first_task(plan, client), private or {}, TrainingContext(client.train))


class TestAttack:
    @pytest.mark.parametrize(("targeted", "expected"), [(False, (0.4, 0.6)), (True, (0.6, 0.4))])
    def test_attack_on_a_logistic_model_matches_values_worked_out_by_hand(
        self, targeted: bool, expected: tuple[float, float]
    ) -> None:
        """w = (1, −2), x = (½, ½), y = +1, ε = 0.1; targeting the correct class makes it easier, not harder."""
        options = AdvPropOptions(epsilon=25.5, random_start=False, targeted=targeted)
        x, w = torch.full((1, 1, 1, 2), 0.5), torch.tensor([1.0, -2.0])
        found = Attack(GREY, options)(x, lambda at: F.softplus(-(at.flatten() @ w)))
        assert found.flatten().tolist() == pytest.approx(expected)

    @pytest.mark.parametrize("iterations", [1, 4])
    def test_images_stay_within_epsilon_and_each_channel_s_range(self, iterations: int) -> None:
        options = AdvPropOptions(epsilon=16, iterations=iterations)
        pixels = torch.rand(8, 3, 4, 4)
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (COLOUR.mean, COLOUR.std))
        weight = torch.randn(3, 4, 4)
        found = Attack(COLOUR, options)((pixels - mean) / std, lambda at: (at * weight).sum())
        changed = found * std + mean
        assert float((changed - pixels).abs().max()) <= 16 / 255 + 1e-6
        assert float((changed - pixels).abs().max()) > 15 / 255
        assert 0 - 1e-6 <= float(changed.min()) <= float(changed.max()) <= 1 + 1e-6

    def test_step_is_large_enough_to_reach_epsilon(self) -> None:
        assert Attack(GREY, AdvPropOptions(epsilon=10, iterations=2, step=1)).step.item() == pytest.approx(5 / 255)
        assert Attack(GREY, AdvPropOptions(epsilon=4, iterations=8, step=1)).step.item() == pytest.approx(1 / 255)

    def test_attack_leaves_no_gradients_on_the_weights(self) -> None:
        net = nn.Linear(2, 2)
        Attack(GREY, AdvPropOptions(epsilon=8))(torch.rand(3, 1, 1, 2), lambda at: net(at.flatten(1)).sum())
        assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("backbone", ["lenet", NORMED])
def test_zero_iterations_equal_fedavg_to_the_bit(backbone: str) -> None:
    plain, _ = train({"name": "fedavg"}, backbone)
    found, _ = train({"name": "advprop", "iterations": 0}, backbone)
    assert_same_tensors({name: found.shared[name] for name in plain.shared}, plain.shared)


def test_zero_epsilon_without_batchnorm_equals_fedavg() -> None:
    plain, _ = train({"name": "fedavg"}, "lenet")
    found, private = train({"name": "advprop", "epsilon": 0.0, "step": 0.0}, "lenet")
    assert private == {}
    assert found.shared.keys() == plain.shared.keys()
    for name, value in plain.shared.items():
        torch.testing.assert_close(found.shared[name], value, rtol=1e-4, atol=1e-6)
    stronger, _ = train({"name": "advprop", "epsilon": 8.0}, "lenet")
    assert not torch.allclose(stronger.shared["logits.weight"], plain.shared["logits.weight"], rtol=1e-4, atol=1e-6)


def test_main_batchnorm_sees_only_clean_images_and_the_auxiliary_one_only_adversarial_ones() -> None:
    """After one step, the main statistics equal FedAvg's; the auxiliary ones come from the modified images."""
    data = digits(8)
    plan = plan_for({"name": "advprop", "epsilon": 32.0}, NORMED)
    client = site("a", data)
    update, _ = client_half(plan).train(first_task(plan, client), {}, TrainingContext(data))
    fedavg = plan_for({"name": "fedavg"}, NORMED)
    plain, _ = client_half(fedavg).train(first_task(fedavg, client), {}, TrainingContext(data))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        main, auxiliary = update.shared[f"backbone.1.{name}"], update.shared[f"backbone.1.auxiliary.{name}"]
        torch.testing.assert_close(main, plain.shared[f"backbone.1.{name}"])
        assert name == "num_batches_tracked" or not torch.equal(main, auxiliary)


def test_one_step_matches_plain_pytorch() -> None:
    """The attack uses the auxiliary layer's running statistics; then the network trains on both halves."""
    plan = plan_for({"name": "advprop", "epsilon": 8.0, "random_start": False}, NORMED)
    client = site("a", digits(8))
    task = first_task(plan, client)
    for name in ("weight", "bias", "running_mean"):
        task.shared[f"backbone.1.auxiliary.{name}"] += torch.randn(4)
    update, _ = client_half(plan).train(task, {}, TrainingContext(client.train))
    net, auxiliary = build_single(plan), nn.BatchNorm2d(4)
    net.load_state_dict(without_auxiliary(task.shared))
    auxiliary.load_state_dict(strip_prefix(task.shared, "backbone.1.auxiliary."))
    convolution, main, *rest = net.backbone
    ((x, y),) = client.train.batches(8, derive_seed(plan.seed, "batches", "a", 1, 0))

    def loss(images: Tensor, layer: nn.Module) -> Tensor:
        return mean_loss(net.logits(nn.Sequential(convolution, layer, *rest)(images)), y)

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, auxiliary.eval()), leaf)
    adversarial = (x + 8 / 255 / 0.5 * gradient.sign()).clamp(-1, 1)
    (0.5 * loss(x, main) + 0.5 * loss(adversarial, auxiliary.train())).backward()
    torch.optim.SGD([*net.parameters(), *auxiliary.parameters()], lr=0.05).step()
    expected = {**net.state_dict(), **add_prefix(auxiliary.state_dict(), "backbone.1.auxiliary.")}
    torch.testing.assert_close(update.shared, expected, rtol=1e-4, atol=1e-6)


def test_auxiliary_layers_start_as_copies_of_the_main_ones() -> None:
    """So this method can start from a plain checkpoint."""
    plan = plan_for({"name": "advprop"}, NORMED)
    pretrained = build_single(plan).state_dict()
    pretrained = {name: value + 1 for name, value in pretrained.items()}
    private = plan_for({"name": "advprop", "auxiliary_batchnorm": "private", "iterations": 0}, NORMED)
    client = site("a", digits(8))
    task = first_task(private, client, server_half(private).initial_state(pretrained))
    _, kept = client_half(private).train(task, {}, TrainingContext(client.train))
    assert torch.equal(kept["backbone.1.auxiliary.running_mean"], pretrained["backbone.1.running_mean"])
    shared = server_half(plan).initial_state(pretrained).shared
    assert torch.equal(shared["backbone.1.auxiliary.running_mean"], pretrained["backbone.1.running_mean"])


def test_auxiliary_layers_can_stay_at_the_client() -> None:
    update, kept = train({"name": "advprop", "auxiliary_batchnorm": "private"}, NORMED)
    averaged, nothing = train({"name": "advprop"}, NORMED)
    assert nothing == {}
    assert not any("auxiliary" in name for name in update.shared)
    assert_same_tensors(kept | update.shared, averaged.shared)
    again, _ = train({"name": "advprop", "auxiliary_batchnorm": "private"}, NORMED, kept)
    assert differ(again.shared, update.shared)  # the attack depends on them


def test_prediction_uses_the_main_layers_only() -> None:
    plan = plan_for({"name": "advprop", "epsilon": 16.0}, NORMED)
    simulation = Simulation(plan, [site("a", digits()), site("b", digits(24, 24))])
    simulation.run_round()
    state = simulation.state.shared
    net = build_single(plan).eval()
    net.load_state_dict({name: value for name, value in state.items() if "auxiliary" not in name})
    task = simulation.task(simulation.clients[0])
    found = simulation.client.predictor(task, {}, Runtime())(digits(8).images)
    assert torch.equal(found, net(digits(8).images))


def test_targets_cover_all_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def listening(logits: Tensor, labels: Tensor) -> Tensor:
        asked.append(labels)
        return mean_loss(logits, labels)

    monkeypatch.setattr("shared.learning.methods.advprop.mean_loss", listening)
    train({"name": "advprop", "targeted": True}, "lenet")
    aims, labels = torch.cat(asked[::2]), torch.cat([both[: len(both) // 2] for both in asked[1::2]])
    assert len(labels) == 24
    assert set(((aims - labels) % CLASSES).tolist()) == {1, 2, 3}


def test_targeted_attack_changes_the_result_repeatably() -> None:
    first, _ = train({"name": "advprop", "targeted": True, "epsilon": 8.0}, "lenet")
    again, _ = train({"name": "advprop", "targeted": True, "epsilon": 8.0}, "lenet")
    away, _ = train({"name": "advprop", "epsilon": 8.0}, "lenet")
    assert_same_tensors(first.shared, again.shared)
    assert differ(first.shared, away.shared)
