import copy

import pytest
import torch
import torch.nn.functional as F
from support.distrans import (
    RULES,
    SHAPE,
    digits,
    options_of,
    plan_with,
    task_for,
    train,
)
from support.halves import server_half
from support.programs import needs
from support.tensor_data import TensorData
from support.tensors import assert_same_tensors, differ
from torch import Tensor, nn

from shared.learning.backbones import Backbone, Stem
from shared.learning.methods.base import (
    RoundTask,
    Update,
)
from shared.learning.methods.distrans import OffsetStepper
from shared.learning.model import DoubleChannelModel, blend, build_double
from shared.learning.runtime import Runtime


class Scalar(nn.Module):
    """prediction = w · (x_L − x_R)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def image_term(self, _x: Tensor) -> None:
        return None

    def forward(self, x: Tensor, offset: Tensor, image_term: Tensor | None) -> Tensor:
        assert image_term is None
        left, right = blend(x, offset, 0.3)
        return self.w * (left - right)


class TestUpdateRules:
    @pytest.mark.parametrize(("rule", "weight"), [("joint", 0.542), ("alternating", 0.542496062)])
    def test_one_step_matches_the_scalar_example_worked_out_by_hand(
        self, rule: str, weight: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """x = 1, t = 2, α = 0.3, w = 0.5, both rates 0.1, with a squared loss."""
        monkeypatch.setattr(
            "shared.learning.methods.distrans.mean_loss", lambda found, wanted: 0.5 * (found - wanted).square().sum()
        )
        plan = plan_with(update_rule=rule, offset_lr=0.1, training={"lr": 0.1})
        net, offset = Scalar(), torch.full((1, 1, 1), 2.0, dtype=torch.float64, requires_grad=True)
        x, y = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        OffsetStepper(net, offset, plan, options_of(plan), Runtime()).step(x, y)
        assert net.w.item() == pytest.approx(weight, abs=1e-12)
        assert offset.item() == pytest.approx(2.021, abs=1e-12)

    @pytest.mark.parametrize("rule", RULES)
    def test_weight_gradients_are_computed_once_per_step_and_not_in_the_offset_s_pass(self, rule: str) -> None:
        plan = plan_with(update_rule=rule)
        net, offset = build_double(plan, 0.3).train(), torch.randn(SHAPE).requires_grad_()
        computed, left_behind = dict[str, int](), list[bool]()
        for name, weight in net.named_parameters():
            weight.register_hook(lambda _, name=name: computed.update({name: computed.get(name, 0) + 1}))
        stepper = OffsetStepper(net, offset, plan, options_of(plan), Runtime())
        offset.register_hook(lambda _: left_behind.append(any(w.grad is not None for w in net.parameters())))
        stepper.step(digits().images[:4], digits().labels[:4])
        assert computed == {name: 1 for name, _ in net.named_parameters()}
        assert len(left_behind) == 1
        if rule == "alternating":
            assert left_behind == [False]
        assert offset.grad is None

    def test_alternating_step_updates_batchnorm_like_one_model_step_at_the_new_offset(self) -> None:
        plan = plan_with(offset_lr=5.0)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        net = DoubleChannelModel(Backbone(nn.Sequential(*layers), features=16), classes=10, alpha=0.3).train()
        plain, start = copy.deepcopy(net), torch.randn(SHAPE)
        offset, x, y = start.clone().requires_grad_(), digits().images[:8], digits().labels[:8]
        OffsetStepper(net, offset, plan, options_of(plan), Runtime()).step(x, y)
        assert not torch.equal(offset, start)
        F.cross_entropy(plain(x, offset.detach()), y).backward()
        torch.optim.SGD(plain.parameters(), lr=0.05).step()
        assert int(net.state_dict()["backbone.1.num_batches_tracked"]) == 2  # the two channels of one pass
        assert_same_tensors(net.state_dict(), plain.state_dict())

    def test_first_offset_gradient_is_the_same_under_both_rules(self) -> None:
        one_batch = TensorData(digits().images[:16], digits().labels[:16])
        after = {rule: train(plan_with(update_rule=rule, offset_lr=1.0), one_batch)[1]["offset"] for rule in RULES}
        torch.testing.assert_close(after["alternating"], after["joint"], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "sign-sgd"])
    @pytest.mark.parametrize("shortcut", [True, False])
    def test_rules_agree_to_the_bit_with_a_frozen_offset(
        self, optimizer: str, shortcut: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both with the shortcut for frozen offsets and without it."""
        if not shortcut:
            monkeypatch.setattr(OffsetStepper, "_frozen", property(lambda _: False, lambda *_: None), raising=False)
        results = [train(plan_with(update_rule=rule, offset_lr=0, offset_optimizer=optimizer)) for rule in RULES]
        (update, private), (other, other_private) = results
        assert_same_tensors(update.shared, other.shared)
        assert_same_tensors(private, other_private)
        assert torch.equal(private["offset"], task_for(plan_with()).personal["initial_offset"])
        assert update.report.offset_motion == 0

    def test_frozen_offset_is_the_limit_of_a_slow_one(self) -> None:
        """Frozen offsets take a shortcut through the code, which must give the same result."""
        frozen, _ = train(plan_with(offset_lr=0))
        for rule in RULES:
            slow, _ = train(plan_with(offset_lr=1e-9, update_rule=rule))
            for name, value in frozen.shared.items():
                torch.testing.assert_close(slow.shared[name], value, rtol=1e-4, atol=1e-6)

    def test_rules_differ_once_the_offset_moves(self) -> None:
        updates = [train(plan_with(update_rule=rule, offset_lr=1.0))[0] for rule in RULES]
        assert differ(updates[0].shared, updates[1].shared)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "sign-sgd"])
    def test_offset_never_moves_at_alpha_zero(self, optimizer: str) -> None:
        update, private = train(plan_with(alpha=0, offset_optimizer=optimizer))
        assert torch.equal(private["offset"], private["initial_offset"])
        assert update.report.offset_motion == 0

    def test_step_returns_logits_and_loss_of_the_model_s_pass(self) -> None:
        plan = plan_with(offset_lr=5.0)
        net, offset = build_double(plan, 0.3), torch.randn(SHAPE).requires_grad_()
        before, x, y = copy.deepcopy(net), digits().images[:8], digits().labels[:8]
        logits, loss = OffsetStepper(net, offset, plan, options_of(plan), Runtime()).step(x, y)
        assert torch.equal(logits, before(x, offset.detach()).detach())
        assert torch.equal(loss, F.cross_entropy(logits, y))


class TestOffsetOptimizers:
    def test_paper_s_rate_hardly_moves_the_offset(self) -> None:
        motion = train(plan_with())[0].report.offset_motion
        assert motion is not None
        assert 0 < motion < 1e-4

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("optimizer", ["adam", "sign-sgd"])
    def test_other_optimizers_move_the_offset_visibly_in_one_small_epoch(self, optimizer: str, rule: str) -> None:
        motion = train(plan_with(offset_optimizer=optimizer, update_rule=rule))[0].report.offset_motion
        assert motion is not None
        assert motion > 0.1

    def test_sign_sgd_moves_every_pixel_with_a_gradient_by_its_rate(self) -> None:
        one_batch = TensorData(digits().images[:16], digits().labels[:16])
        _, private = train(plan_with(offset_optimizer="sign-sgd", offset_lr=0.125), one_batch)
        moved = private["offset"] - private["initial_offset"]
        _, by_gradient = train(plan_with(offset_lr=1.0), one_batch)
        assert torch.equal(moved.sign(), (by_gradient["offset"] - by_gradient["initial_offset"]).sign())
        torch.testing.assert_close(moved.abs(), 0.125 * moved.sign().abs(), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("rule", RULES)
    def test_summed_gradient_is_the_mean_times_the_batch_size(self, rule: str) -> None:
        for images in (16, 5):
            batch = TensorData(digits().images[:images], digits().labels[:images])
            moved = {}
            for gradient in ("mean", "sum"):
                plan = plan_with(update_rule=rule, offset_gradient=gradient, offset_lr=1.0)
                _, private = train(plan, batch)
                moved[gradient] = private["offset"] - private["initial_offset"]
            torch.testing.assert_close(moved["sum"], images * moved["mean"], rtol=1e-3, atol=1e-5)

    def test_clipping_applies_to_the_model_only(self) -> None:
        batch = TensorData(digits().images[:16], digits().labels[:16])
        free, clipped = (plan_with(offset_lr=1.0, training={"clip_norm": norm}) for norm in (None, 0.01))
        start = server_half(free).initial_state().shared

        def distance(update: Update) -> float:
            return float(sum((update.shared[name] - start[name]).square().sum() for name in start) ** 0.5)

        (free_update, free_private), (clipped_update, clipped_private) = train(free, batch), train(clipped, batch)
        assert distance(free_update) > 0.05 * 0.1
        assert distance(clipped_update) == pytest.approx(0.05 * 0.01, rel=1e-3)
        assert torch.equal(clipped_private["offset"], free_private["offset"])

    def test_offset_optimizer_is_reset_every_round(self) -> None:
        """Adam's first step equals its rate in every pixel with a gradient, whatever happened in earlier rounds."""
        plan = plan_with(offset_optimizer="adam", offset_lr=0.125)
        _, private = train(plan)
        batch = TensorData(digits().images[:16], digits().labels[:16])
        _, later = train(plan, batch, private)
        steps = (later["offset"] - private["offset"]).abs()
        assert float(steps.median()) == pytest.approx(0.125, rel=1e-3)


class TestRuntimes:
    def test_bf16_trains_and_yields_float32(self) -> None:
        plan = plan_with(offset_optimizer="adam", training={"lr": 0.1})
        update, private = train(plan, runtime=Runtime(precision="bf16"))
        exact, _ = train(plan)
        tensors = {**update.shared, **private}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
        assert differ(update.shared, exact.shared)  # it really computed in bf16
        assert update.report.loss == pytest.approx(exact.report.loss, rel=0.02)
        start = task_for(plan)
        trained = RoundTask("a", 1, update.shared, start.personal, start.facts)
        later, _ = train(plan, private=private, runtime=Runtime(precision="bf16"), task=trained)
        assert later.report.loss < 0.95 * update.report.loss

    def test_channels_last_gives_the_same_results_in_contiguous_memory(self) -> None:
        plan = plan_with((3, 16, 16), offset_lr=1.0)
        data = digits(channels=3)
        plain, plain_private = train(plan, data)
        update, private = train(plan, data, runtime=Runtime(channels_last=True))
        for name, value in {**plain.shared, **plain_private}.items():
            torch.testing.assert_close({**update.shared, **private}[name], value, rtol=1e-3, atol=1e-5)
        assert all(tensor.is_contiguous() for tensor in (*update.shared.values(), *private.values()))

    def test_compiled_network_takes_the_same_steps(self) -> None:
        needs("g++", "gcc", "clang")  # torch.compile needs a compiler
        plan = plan_with(offset_lr=5.0)
        stem = Stem(1, 2, 3)
        net = DoubleChannelModel(
            Backbone(nn.Sequential(stem, nn.ReLU(), nn.Flatten(), nn.Linear(2 * 14 * 14, 8)), features=8, stem=stem),
            classes=10,
            alpha=0.3,
        )
        start, x, y = torch.randn(SHAPE), digits().images[:8], digits().labels[:8]
        results = []
        for compiled in (False, True):
            own, offset = copy.deepcopy(net).train(), start.clone().requires_grad_()
            stepper = OffsetStepper(own, offset, plan, options_of(plan), Runtime(compile=compiled))
            for _ in range(2):
                stepper.step(x, y)
            results.append({**own.state_dict(), "offset": offset.detach()})
        eager, found = results
        assert found.keys() == eager.keys()  # no trace of the wrapper in the names
        for name, value in eager.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
        assert differ({"offset": start}, found)
