"""BatchNorm and dropout across the two channels, private BatchNorm statistics, and the single-channel ablation."""

from typing import Any

import pytest
import torch
from support.halves import server_half
from support.tensors import assert_same_tensors
from support.tiny import NORMED, digits, first_task, plan_for, site
from torch import nn

from lab.simulation.simulation import Simulation
from shared.contract.plan import FederationPlan
from shared.learning.backbones import Backbone
from shared.learning.batchnorm import using
from shared.learning.methods import client_half
from shared.learning.methods.base import TrainingContext
from shared.learning.model import DoubleChannelModel, blend, build_double, build_single
from shared.learning.runtime import Runtime

OFFSET = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(3))


def plan(**method: Any) -> FederationPlan:
    return plan_for({"name": "distrans", "offset_aggregation": "none", **method}, NORMED)


@pytest.mark.parametrize(("kind", "counts"), [("two-passes", [2]), ("joint", [1]), ("separate", [1, 1])])
def test_number_of_statistics_updates_per_step_depends_on_the_kind(kind: Any, counts: list[int]) -> None:
    net = build_double(plan(), 0.3, kind).train()
    net(digits(8).images, OFFSET)
    assert [int(value) for name, value in net.state_dict().items() if name.endswith("tracked")] == counts


def test_joint_batchnorm_takes_one_pass_over_both_channels() -> None:
    net, x = build_double(plan(), 0.3, "joint").train(), digits(8).images
    both = net.features(torch.cat(blend(x, OFFSET, 0.3)))
    expected = net.logits(torch.cat([both[:8], both[8:]], dim=1))
    torch.testing.assert_close(net(x, OFFSET), expected)
    assert not torch.allclose(build_double(plan(), 0.3).train()(x, OFFSET), expected)


def test_separate_batchnorm_normalizes_each_channel_with_its_own_layers() -> None:
    net, x = build_double(plan(), 0.3, "separate").train(), digits(8).images
    in_training = net(x, OFFSET)
    torch.testing.assert_close(in_training, build_double(plan(), 0.3).train()(x, OFFSET))  # same batch statistics
    net.eval()
    left, right = blend(x, OFFSET, 0.3)
    found = net(x, OFFSET)
    with using(net, "main"):
        z_left = net.features(left)
    with using(net, "auxiliary"):
        z_right = net.features(right)
    torch.testing.assert_close(found, net.logits(torch.cat([z_left, z_right], dim=1)))
    layer: Any = net.backbone[1]  # type: ignore[index]
    assert not torch.equal(layer.running_mean, layer.auxiliary.running_mean)


def test_separate_layers_start_as_copies_of_the_given_weights() -> None:
    the_plan = plan(batchnorm="separate")
    pretrained = {name: value + 1 for name, value in build_single(the_plan).state_dict().items()}
    shared = server_half(the_plan).initial_state(pretrained).shared
    for name in ("weight", "running_mean"):
        assert torch.equal(shared[f"backbone.1.auxiliary.{name}"], pretrained[f"backbone.1.{name}"])


def test_private_statistics_stay_at_the_client_and_carry_over() -> None:
    the_plan = plan(batchnorm_statistics="private")
    simulation = Simulation(the_plan, [site("a", digits()), site("b", digits(16, 24))])
    start = server_half(the_plan).initial_state().shared
    for _ in range(2):
        simulation.run_round()
    counters = [client.private["buffers.backbone.1.num_batches_tracked"].item() for client in simulation.clients]
    assert counters == [12, 8]  # two passes over three and two batches, twice
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(simulation.state.shared[f"backbone.1.{name}"], start[f"backbone.1.{name}"])
    first, second = simulation.clients
    foreign = {name: value for name, value in second.private.items() if name.startswith("buffers.")}
    answers = [
        simulation.client.predictor(simulation.task(first), kept, Runtime())(digits(6).images)
        for kept in (first.private, first.private | foreign)
    ]
    assert not torch.equal(*answers)


def dropping_net(channels: int, height: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(channels * height * width, 8))


class TestDropout:
    @pytest.mark.parametrize("normed", [False, True], ids=["one pass", "two passes"])
    @pytest.mark.parametrize("shared", [True, False])
    def test_mask_is_the_same_in_both_channels_only_if_shared(self, shared: bool, normed: bool) -> None:
        """At α = 0 both channels see the same image, so only dropout can make them differ."""
        layers: list[nn.Module] = [nn.Flatten(), *([nn.BatchNorm1d(256)] if normed else []), nn.Dropout(0.5)]
        backbone = Backbone(nn.Sequential(*layers, nn.Linear(256, 8)), features=8)
        net = DoubleChannelModel(backbone, 4, 0.0, shared_dropout=shared).train()
        seen: list[torch.Tensor] = []
        net.logits.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for _ in range(2):
            net(digits(8).images, OFFSET)
        left, right = seen[0].chunk(2, dim=1)
        assert torch.equal(left, right) is shared
        assert not torch.equal(seen[0], seen[1])  # every step draws a new mask
        net.eval()(digits(8).images, OFFSET)
        assert torch.equal(*seen[-1].chunk(2, dim=1))

    def test_shared_dropout_preserves_the_expected_value_and_the_rate(self) -> None:
        net = DoubleChannelModel(
            Backbone(nn.Sequential(nn.Flatten(), nn.Dropout(0.25)), 256), 4, 0.0, shared_dropout=True
        )
        dropout: Any = net.backbone[1]  # type: ignore[index]
        dropped = dropout.train()(torch.ones(200, 256))
        assert sorted(dropped.unique().tolist()) == pytest.approx([0, 4 / 3])
        assert float(dropped.mean()) == pytest.approx(1, abs=0.02)

    @pytest.mark.parametrize("shared", [True, False])
    def test_plan_option_enables_it(self, shared: bool) -> None:
        """At α = 0 both halves of the head get the same gradient exactly if dropout is the same in both channels."""
        method = {"name": "distrans", "offset_aggregation": "none", "alpha": 0.0, "shared_dropout": shared}
        the_plan, client = plan_for(method, f"{__name__}:{dropping_net.__name__}"), site("a", digits(8))
        task = first_task(the_plan, client)
        update, _ = client_half(the_plan).train(task, {}, TrainingContext(client.train))
        left, right = (update.shared["logits.weight"] - task.shared["logits.weight"]).chunk(2, dim=1)
        assert float(left.abs().max()) > 1e-3
        assert torch.allclose(left, right, rtol=0, atol=1e-6) is shared

    def test_network_without_dropout_is_unaffected(self) -> None:
        client = site("a", digits(8))
        the_plan = plan(shared_dropout=True)
        update, _ = client_half(the_plan).train(first_task(the_plan, client), {}, TrainingContext(client.train))
        plain, _ = client_half(plan()).train(first_task(plan(), client), {}, TrainingContext(client.train))
        assert_same_tensors(update.shared, plain.shared)


class TestSingleInputChannel:
    @pytest.mark.parametrize("training", [True, False])
    def test_ablation_is_the_left_channel_with_its_own_head(self, training: bool) -> None:
        net, x = build_double(plan(), 0.3, input_channels="single").train(training), digits(8).images
        left, _ = blend(x, OFFSET, 0.3)
        torch.testing.assert_close(net(x, OFFSET), net.logits(net.features(left)))
        assert net.logits.in_features * 2 == build_double(plan(), 0.3).logits.in_features

    def test_ablation_has_the_weights_of_the_single_channel_model(self) -> None:
        the_plan = plan(input_channels="single")
        assert_same_tensors(server_half(the_plan).initial_state().shared, build_single(the_plan).state_dict())

    def test_ablation_learns_its_offset_and_predicts_with_it(self) -> None:
        the_plan = plan(input_channels="single", offset_optimizer="adam")
        client = site("a", digits())
        simulation = Simulation(the_plan, [client])
        simulation.run_round()
        start = client.private["initial_offset"]
        assert (client.private["offset"] - start).abs().max() > 0.01
        images = digits(6).images
        answers = [
            simulation.client.predictor(simulation.task(client), {"offset": offset}, Runtime())(images)
            for offset in (client.private["offset"], start)
        ]
        assert not torch.equal(*answers)
