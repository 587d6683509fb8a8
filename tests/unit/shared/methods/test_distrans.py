import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.programs import needs
from support.tiny import Tensors, assert_equal, differ
from torch import Tensor, nn

from lab.datasets import load_digits
from shared.backbones import Backbone, Stem
from shared.generator import GeneratorTrainer
from shared.heterogeneity import class_embeddings
from shared.method_options import DistransOptions
from shared.methods import client_half, server_half
from shared.methods.base import ClientRecord, Facts, RoundTask, ServerState, TrainingInterrupted, Update, Workplace
from shared.methods.distrans import OffsetStepper
from shared.model import DoubleChannelModel, blend, build_double
from shared.offsets import initial_offset, relative_motion
from shared.plan import FederationPlan, ImagePlan, validate_plan
from shared.runtime import Runtime
from shared.tensor_data import TensorData
from shared.wire import Spec

SHAPE = (1, 16, 16)
RULES = ["alternating", "joint"]


def plan_with(
    shape: tuple[int, int, int] = SHAPE, classes: int = 10, training: dict[str, Any] | None = None, **method: Any
) -> FederationPlan:
    channels, height, width = shape
    return validate_plan(
        {
            "name": "distrans",
            "preset": "paper",
            "classes": [str(number) for number in range(classes)],
            "image": {"channels": channels, "height": height, "width": width},
            "model": {"activation": "relu"},
            "method": {"offset_aggregation": "none", **method},
            "training": {"lr": 0.05, "batch_size": 16, **(training or {})},
        }
    )


def options_of(plan: FederationPlan) -> DistransOptions:
    assert isinstance(plan.method, DistransOptions)
    return plan.method


@functools.cache
def digits(count: int = 160, channels: int = 1) -> TensorData:
    image = ImagePlan(channels=channels, height=16, width=16)
    train, _ = load_digits(image)
    return TensorData(train.images[:count], train.labels[:count])


def record(name: str, *counts: int) -> ClientRecord:
    return ClientRecord(name, counts)


ROSTER = [record("a", 30, 10, 0), record("b", 10, 30, 5), record("c", 0, 20, 5)]


def task_for(plan: FederationPlan, client: str = "a", number: int = 0) -> RoundTask:
    """The client's task in a federation where it is alone and that has just begun."""
    server, own = server_half(plan), record(client, *[5] * len(plan.classes))
    state, facts = server.initial_state(), server.facts([own])
    return RoundTask(client, number, state.shared, server.personal(state, own, [own], facts), facts)


def train(
    plan: FederationPlan,
    data: TensorData | None = None,
    private: Tensors | None = None,
    runtime: Runtime | None = None,
    task: RoundTask | None = None,
) -> tuple[Update, Tensors]:
    place = Workplace(digits() if data is None else data, runtime or Runtime())
    return client_half(plan).train(task or task_for(plan), private or {}, place)


class Scalar(nn.Module):
    """prediction = w · (x_L − x_R)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def of_image(self, _x: Tensor) -> None:
        return None

    def forward(self, x: Tensor, offset: Tensor, of_image: Tensor | None) -> Tensor:
        assert of_image is None
        left, right = blend(x, offset, 0.3)
        return self.w * (left - right)


class TestUpdateRules:
    @pytest.mark.parametrize(("rule", "weight"), [("joint", 0.542), ("alternating", 0.542496062)])
    def test_the_scalar_example(self, rule: str, weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """x = 1, t = 2, α = 0.3, w = 0.5, both rates 0.1; only the loss is not the method's own."""
        monkeypatch.setattr(
            "shared.methods.distrans.mean_loss", lambda found, wanted: 0.5 * (found - wanted).square().sum()
        )
        plan = plan_with(update_rule=rule, offset_lr=0.1, training={"lr": 0.1})
        net, offset = Scalar(), torch.full((1, 1, 1), 2.0, dtype=torch.float64, requires_grad=True)
        x, y = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        OffsetStepper(net, offset, plan, options_of(plan), Runtime()).step(x, y)
        assert net.w.item() == pytest.approx(weight, abs=1e-12)
        assert offset.item() == pytest.approx(2.021, abs=1e-12)

    @pytest.mark.parametrize("rule", RULES)
    def test_weights_get_their_gradients_once_a_step_and_none_in_the_offsets_own_pass(self, rule: str) -> None:
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

    def test_an_alternating_step_moves_batchnorm_as_one_model_step_at_the_new_offset(self) -> None:
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
        assert_equal(net.state_dict(), plain.state_dict())

    def test_the_first_gradient_of_the_offset_is_that_at_the_start_under_both_rules(self) -> None:
        one_batch = TensorData(digits().images[:16], digits().labels[:16])
        after = {rule: train(plan_with(update_rule=rule, offset_lr=1.0), one_batch)[1]["offset"] for rule in RULES}
        torch.testing.assert_close(after["alternating"], after["joint"], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "sign-sgd"])
    @pytest.mark.parametrize("shortcut", [True, False])
    def test_with_a_frozen_offset_the_rules_are_one_to_the_bit(
        self, optimizer: str, shortcut: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the shorter way that a frozen offset takes, which is the same for both, and without it."""
        if not shortcut:
            monkeypatch.setattr(OffsetStepper, "_frozen", property(lambda _: False, lambda *_: None), raising=False)
        results = [train(plan_with(update_rule=rule, offset_lr=0, offset_optimizer=optimizer)) for rule in RULES]
        (update, private), (other, other_private) = results
        assert_equal(update.shared, other.shared)
        assert_equal(private, other_private)
        assert torch.equal(private["offset"], task_for(plan_with()).personal["initial_offset"])
        assert update.report.offset_motion == 0

    def test_a_frozen_offset_is_the_limit_of_a_slow_one(self) -> None:
        """The frozen offset takes a shorter way through the code; it must lead to the same place."""
        frozen, _ = train(plan_with(offset_lr=0))
        for rule in RULES:
            slow, _ = train(plan_with(offset_lr=1e-9, update_rule=rule))
            for name, value in frozen.shared.items():
                torch.testing.assert_close(slow.shared[name], value, rtol=1e-4, atol=1e-6)

    def test_the_rules_differ_once_the_offset_moves(self) -> None:
        updates = [train(plan_with(update_rule=rule, offset_lr=1.0))[0] for rule in RULES]
        assert differ(updates[0].shared, updates[1].shared)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "sign-sgd"])
    def test_at_alpha_zero_the_offset_never_moves(self, optimizer: str) -> None:
        update, private = train(plan_with(alpha=0, offset_optimizer=optimizer))
        assert torch.equal(private["offset"], private["initial_offset"])
        assert update.report.offset_motion == 0

    def test_the_returned_logits_and_loss_are_those_of_the_models_own_pass(self) -> None:
        plan = plan_with(offset_lr=5.0)
        net, offset = build_double(plan, 0.3), torch.randn(SHAPE).requires_grad_()
        before, x, y = copy.deepcopy(net), digits().images[:8], digits().labels[:8]
        logits, loss = OffsetStepper(net, offset, plan, options_of(plan), Runtime()).step(x, y)
        assert torch.equal(logits, before(x, offset.detach()).detach())
        assert torch.equal(loss, F.cross_entropy(logits, y))


class TestOffsetOptimisers:
    def test_the_papers_rate_hardly_moves_the_offset(self) -> None:
        motion = train(plan_with())[0].report.offset_motion
        assert motion is not None
        assert 0 < motion < 1e-4

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("optimizer", ["adam", "sign-sgd"])
    def test_the_others_move_it_visibly_within_a_small_epoch(self, optimizer: str, rule: str) -> None:
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
    def test_a_summed_gradient_is_the_mean_one_times_the_batch(self, rule: str) -> None:
        for images in (16, 5):
            batch = TensorData(digits().images[:images], digits().labels[:images])
            moved = {}
            for gradient in ("mean", "sum"):
                plan = plan_with(update_rule=rule, offset_gradient=gradient, offset_lr=1.0)
                _, private = train(plan, batch)
                moved[gradient] = private["offset"] - private["initial_offset"]
            torch.testing.assert_close(moved["sum"], images * moved["mean"], rtol=1e-3, atol=1e-5)

    def test_the_gradients_norm_is_clipped_for_the_model_only(self) -> None:
        batch = TensorData(digits().images[:16], digits().labels[:16])
        free, clipped = (plan_with(offset_lr=1.0, training={"clip_norm": norm}) for norm in (None, 0.01))
        start = server_half(free).initial_state().shared

        def distance(update: Update) -> float:
            return float(sum((update.shared[name] - start[name]).square().sum() for name in start) ** 0.5)

        (free_update, free_private), (clipped_update, clipped_private) = train(free, batch), train(clipped, batch)
        assert distance(free_update) > 0.05 * 0.1
        assert distance(clipped_update) == pytest.approx(0.05 * 0.01, rel=1e-3)
        assert torch.equal(clipped_private["offset"], free_private["offset"])

    def test_the_optimiser_of_the_offset_is_new_in_every_round(self) -> None:
        """Adam's first step is its rate in every pixel with a gradient, whatever an earlier round has left behind."""
        plan = plan_with(offset_optimizer="adam", offset_lr=0.125)
        _, private = train(plan)
        batch = TensorData(digits().images[:16], digits().labels[:16])
        _, later = train(plan, batch, private)
        steps = (later["offset"] - private["offset"]).abs()
        assert float(steps.median()) == pytest.approx(0.125, rel=1e-3)


class TestWaysToCompute:
    def test_bf16_trains_and_yields_float32(self) -> None:
        plan = plan_with(offset_optimizer="adam", training={"lr": 0.1})
        update, private = train(plan, runtime=Runtime(precision="bf16"))
        exact, _ = train(plan)
        tensors = {**update.shared, **private}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
        assert differ(update.shared, exact.shared)  # it did compute in bf16
        assert update.report.loss == pytest.approx(exact.report.loss, rel=0.02)
        start = task_for(plan)
        trained = RoundTask("a", 1, update.shared, start.personal, start.facts)
        later, _ = train(plan, private=private, runtime=Runtime(precision="bf16"), task=trained)
        assert later.report.loss < 0.95 * update.report.loss

    def test_channels_last_gives_the_same_numbers_in_plain_memory_order(self) -> None:
        plan = plan_with((3, 16, 16), offset_lr=1.0)
        data = digits(channels=3)
        plain, plain_private = train(plan, data)
        update, private = train(plan, data, runtime=Runtime(channels_last=True))
        for name, value in {**plain.shared, **plain_private}.items():
            torch.testing.assert_close({**update.shared, **private}[name], value, rtol=1e-3, atol=1e-5)
        assert all(tensor.is_contiguous() for tensor in (*update.shared.values(), *private.values()))

    def test_a_compiled_network_takes_the_same_steps(self) -> None:
        needs("g++", "gcc", "clang")  # torch.compile has one translate what it writes
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


@dataclass
class Watched:
    """Data that count the batches they gave."""

    data: TensorData
    given: list[int] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return self.data.samples

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.data.batches(size, seed):
            self.given.append(len(labels))
            yield images, labels


class TestClient:
    def test_a_kept_offset_is_the_start_of_the_next_round(self) -> None:
        frozen, kept = plan_with(offset_lr=0), torch.randn(SHAPE)
        _, private = train(frozen, private={"offset": kept, "initial_offset": torch.zeros(SHAPE)})
        assert torch.equal(private["offset"], kept)

    @pytest.mark.parametrize("aggregation", ["mean", "network"])
    def test_an_offset_from_the_coordinator_wins_over_the_kept_one(self, aggregation: str) -> None:
        plan = plan_with(offset_lr=0, offset_aggregation=aggregation)
        sent, task = torch.randn(SHAPE), task_for(plan)
        task = RoundTask("a", 1, task.shared, {"offset": sent}, task.facts)
        update, _ = train(plan, private={"offset": torch.randn(SHAPE)}, task=task)
        assert torch.equal(update.personal["offset"], sent)

    def test_a_lost_private_state_falls_back_to_the_start(self) -> None:
        plan = plan_with(offset_lr=1.0)
        first, private = train(plan)
        begun = task_for(plan)
        task = RoundTask("a", 1, first.shared, begun.personal, begun.facts)
        start = begun.personal["initial_offset"]
        lost, kept = train(plan, private={}, task=task), train(plan, private=private, task=task)
        expected = train(plan, private={"offset": start, "initial_offset": start}, task=task)
        assert_equal(lost[0].shared, expected[0].shared)
        assert_equal(lost[1], expected[1])
        assert differ(lost[0].shared, kept[0].shared)

    def test_a_lost_private_state_goes_on_from_the_coordinator_s_backup(self) -> None:
        plan = plan_with(offset_optimizer="adam", offset_bound=1.0, bounded_clients="all", offset_backup=True)
        server, begun, roster = server_half(plan), task_for(plan), [record("a", *[5] * len(plan.classes))]
        first, private = train(plan, task=begun)
        uploads = [(roster[0], first.personal)]
        state = server.finish(server.initial_state(), first.shared, uploads, roster, begun.facts)
        personal = server.personal(state, roster[0], roster, begun.facts)
        assert torch.equal(personal["offset_backup"], private["offset"])
        task = RoundTask("a", 2, first.shared, personal, begun.facts)
        kept, lost = train(plan, private=private, task=task), train(plan, private={}, task=task)
        assert_equal(lost[0].shared, kept[0].shared)
        assert_equal(lost[1], kept[1])

    @pytest.mark.parametrize("aggregation", ["none", "mean", "network"])
    def test_the_backup_is_the_last_upload_under_every_aggregation(self, aggregation: str) -> None:
        plan, uploads = small_plan(offset_backup=True), uploads_of("a", "b")
        server, older = server_half(plan), ServerState({}, {"offset.of.a": torch.ones(SHAPE)})
        state = server.finish(older, {}, uploads, ROSTER, {"offset_aggregation": aggregation})
        for client, uploaded in uploads:
            personal = server.personal(state, client, ROSTER, {"offset_aggregation": "none"})
            assert torch.equal(personal["offset_backup"], uploaded["offset"])
        assert "offset_backup" not in server.personal(state, ROSTER[2], ROSTER, {"offset_aggregation": "none"})

    def test_without_a_backup_an_offset_that_is_not_aggregated_stays_at_the_client(self) -> None:
        for backup in (False, True):
            plan = plan_with(offset_backup=backup)
            update, _ = train(plan)
            assert ("offset" in update.personal) is backup
            assert ("personal.offset" in server_half(plan).update_spec(task_for(plan).facts).entries) is backup

    def test_the_motion_is_measured_from_the_very_first_offset(self) -> None:
        plan = plan_with(offset_optimizer="adam")
        begun = task_for(plan)
        first, private = train(plan)
        task = RoundTask("a", 1, first.shared, begun.personal, begun.facts)
        second, later = train(plan, private=private, task=task)
        start = begun.personal["initial_offset"]
        assert torch.equal(later["initial_offset"], start)
        assert first.report.offset_motion == relative_motion(private["offset"], start)
        assert second.report.offset_motion == relative_motion(later["offset"], start)
        assert second.report.offset_motion != relative_motion(later["offset"], private["offset"])

    def test_the_motion_from_a_zero_offset_is_its_size(self) -> None:
        update, private = train(plan_with(offset_init="zeros", offset_optimizer="adam"))
        assert update.report.offset_motion == pytest.approx(float(private["offset"].square().mean().sqrt()))
        assert update.report.offset_motion

    @pytest.mark.parametrize("rule", RULES)
    def test_training_that_is_asked_to_stop_stops_and_changes_nothing(self, rule: str) -> None:
        plan = plan_with(offset_optimizer="adam", update_rule=rule)
        task, private, data = task_for(plan), {"offset": torch.randn(SHAPE)}, Watched(digits())
        before = copy.deepcopy((task.shared, task.personal, private))
        random_state = torch.get_rng_state()
        place = Workplace(data, should_stop=lambda: len(data.given) == 4)
        with pytest.raises(TrainingInterrupted):
            client_half(plan).train(task, private, place)
        assert len(data.given) == 4
        for found, expected in zip((task.shared, task.personal, private), before, strict=True):
            assert_equal(found, expected)
        assert torch.equal(torch.get_rng_state(), random_state)

    def test_finished_training_leaves_its_arguments_alone_and_repeats_to_the_bit(self) -> None:
        plan = plan_with(offset_optimizer="adam")
        task, private = task_for(plan), {"offset": torch.randn(SHAPE), "initial_offset": torch.ones(SHAPE)}
        before = copy.deepcopy((task.shared, task.personal, private))
        once = train(plan, private=private, task=task)
        for found, expected in zip((task.shared, task.personal, private), before, strict=True):
            assert_equal(found, expected)
        again = train(plan, private=private, task=task)
        assert_equal(once[0].shared, again[0].shared)
        assert_equal(once[1], again[1])

    def test_predictions_use_the_global_model_and_the_clients_own_offset(self) -> None:
        plan, own, images = plan_with(), torch.randn(SHAPE), digits().images[:6]
        task = task_for(plan)
        net = build_double(plan, 0.3).eval()
        net.load_state_dict(task.shared)
        half = client_half(plan)
        with_own, with_start = (half.predictor(task, private, Runtime()) for private in ({"offset": own}, {}))
        assert torch.equal(with_own(images), net(images, own).detach())
        assert torch.equal(with_start(images), net(images, task.personal["initial_offset"]).detach())
        assert not torch.allclose(with_own(images), with_start(images))

    @pytest.mark.parametrize("aggregation", ["mean", "network"])
    def test_predictions_use_the_coordinators_offset_not_the_one_just_trained(self, aggregation: str) -> None:
        plan, sent, images = plan_with(offset_aggregation=aggregation), torch.randn(SHAPE), digits().images[:6]
        task = task_for(plan)
        task = RoundTask("a", 1, task.shared, {"offset": sent}, task.facts)
        predictor = client_half(plan).predictor(task, {"offset": torch.randn(SHAPE)}, Runtime())
        net = build_double(plan, 0.3).eval()
        net.load_state_dict(task.shared)
        assert torch.equal(predictor(images), net(images, sent).detach())

    def test_a_plan_of_another_method_is_refused(self) -> None:
        plan = validate_plan({"name": "x", "classes": ["a", "b"], "method": {"name": "fedavg"}})
        for half in (type(server_half(plan_with())), type(client_half(plan_with()))):
            with pytest.raises(TypeError, match="fedavg"):
                half(plan)


def small_plan(**method: Any) -> FederationPlan:
    generator = {"hidden": 12, "width": 16, **method.pop("generator", {})}
    return plan_with(classes=3, generator=generator, **method)


def uploads_of(*names: str) -> list[tuple[ClientRecord, Tensors]]:
    generator = torch.Generator().manual_seed(7)
    offsets = {client.id: torch.randn(SHAPE, generator=generator) for client in ROSTER}
    return [(client, {"offset": offsets[client.id]}) for client in ROSTER if client.id in names]


def finished(
    plan: FederationPlan, uploads: list[tuple[ClientRecord, Tensors]], state: ServerState | None = None
) -> tuple[ServerState, Facts]:
    server = server_half(plan)
    facts, state = server.facts(ROSTER), state or server.initial_state()
    return server.finish(state, state.shared, uploads, ROSTER, facts), facts


def embedding_of(client: ClientRecord) -> Tensor:
    counts = np.array([other.class_counts for other in ROSTER])
    return torch.from_numpy(class_embeddings(counts)[ROSTER.index(client)]).float()


def everyone_gets(plan: FederationPlan, state: ServerState, facts: Facts) -> dict[str, Tensors]:
    server = server_half(plan)
    return {client.id: server.personal(state, client, ROSTER, facts) for client in ROSTER}


class TestAggregationInForce:
    @pytest.mark.parametrize(
        ("counts", "expected"),
        [
            ([(5, 3), (4, 5)], "network"),  # DH 0
            ([(5, 3, 1, 1), (4, 5, 1, 0)], "network"),  # DH 0.25
            ([(5, 3), (0, 5)], "none"),  # DH 0.5 exactly
            ([(5, 0), (0, 5)], "none"),  # DH 1
        ],
    )
    def test_auto_takes_the_network_below_one_half_strictly(self, counts: list[tuple[int, ...]], expected: str) -> None:
        roster = [record(str(number), *row) for number, row in enumerate(counts)]
        facts = server_half(plan_with(offset_aggregation="auto")).facts(roster)
        assert facts == {"offset_aggregation": expected}

    @pytest.mark.parametrize("holders", range(2, 11))
    def test_every_threshold_is_strict(self, holders: int) -> None:
        roster = [record(str(number), int(number < holders)) for number in range(10)]
        for threshold, expected in ((10 - holders, "none"), (10 - holders + 1, "network")):
            plan = plan_with(offset_aggregation="auto", dh_threshold=threshold / 10)
            assert server_half(plan).facts(roster) == {"offset_aggregation": expected}

    @pytest.mark.parametrize("aggregation", ["none", "mean", "network"])
    def test_a_plan_that_names_one_has_it_whatever_the_dh(self, aggregation: str) -> None:
        for counts in ([(5, 3), (4, 5)], [(5, 0), (0, 5)]):
            roster = [record(str(number), *row) for number, row in enumerate(counts)]
            facts = server_half(plan_with(offset_aggregation=aggregation)).facts(roster)
            assert facts == {"offset_aggregation": aggregation}

    def test_a_shared_offset_stays_shared_by_the_mean(self) -> None:
        plan = plan_with(offset_aggregation="auto", shared_offset=True)
        assert server_half(plan).facts([record("a", 1, 0), record("b", 0, 1)]) == {"offset_aggregation": "mean"}


class TestNoAggregation:
    def test_the_offset_is_never_uploaded(self) -> None:
        plan = plan_with(offset_optimizer="adam")
        update, private = train(plan)
        assert update.personal == {}
        assert private.keys() == {"offset", "initial_offset"}
        assert update.shared.keys() == build_double(plan, 0.3).state_dict().keys()

    def test_the_coordinator_asks_for_the_model_only_and_keeps_no_offset(self) -> None:
        plan = small_plan()
        state, facts = finished(plan, [(client, {}) for client in ROSTER])
        entries = server_half(plan).update_spec(facts).entries
        assert entries.keys() == {f"shared.{name}" for name in state.shared}
        assert state.private == {}

    def test_every_client_is_sent_its_own_start_in_every_round(self) -> None:
        plan = small_plan()
        state, facts = finished(plan, [(client, {}) for client in ROSTER])
        for name, personal in everyone_gets(plan, state, facts).items():
            assert_equal(personal, {"initial_offset": initial_offset(plan, options_of(plan), name)})


@pytest.mark.parametrize("aggregation", ["mean", "network"])
def test_an_uploaded_offset_is_the_trained_one_and_meets_the_spec(aggregation: str) -> None:
    plan = plan_with(offset_aggregation=aggregation, offset_optimizer="adam")
    update, private = train(plan)
    assert torch.equal(update.personal["offset"], private["offset"])
    sent = {f"shared.{name}": value for name, value in update.shared.items()}
    sent |= {f"personal.{name}": value for name, value in update.personal.items()}
    assert Spec.of(sent) == server_half(plan).update_spec({"offset_aggregation": aggregation})


class TestMean:
    def test_all_clients_get_the_mean_of_those_who_took_part(self) -> None:
        plan, uploads = small_plan(offset_aggregation="mean"), uploads_of("a", "c")
        state, facts = finished(plan, uploads)
        expected = torch.stack([personal["offset"] for _, personal in uploads]).double().mean(dim=0).float()
        for personal in everyone_gets(plan, state, facts).values():  # b too, which did not take part
            assert_equal(personal, {"offset": expected})

    def test_images_do_not_weigh(self) -> None:
        uploads = uploads_of("a", "b", "c")
        by_samples = validate_plan({**small_plan(offset_aggregation="mean").model_dump(), "averaging": "samples"})
        one, other = (finished(plan, uploads)[0] for plan in (small_plan(offset_aggregation="mean"), by_samples))
        assert_equal(one.private, other.private)

    def test_before_the_first_mean_everyone_has_its_own_start(self) -> None:
        plan = small_plan(offset_aggregation="mean")
        server = server_half(plan)
        personal = everyone_gets(plan, server.initial_state(), server.facts(ROSTER))
        assert all(tensors.keys() == {"initial_offset"} for tensors in personal.values())
        assert not torch.equal(personal["a"]["initial_offset"], personal["b"]["initial_offset"])


class TestNetwork:
    def test_one_sgd_step_a_client_in_order_on_the_mean_squared_error_then_its_output_for_all(self) -> None:
        plan, uploads = small_plan(offset_aggregation="network"), uploads_of("a", "b", "c")
        state, facts = finished(plan, uploads)
        net = GeneratorTrainer(plan, options_of(plan).generator).net
        for client, personal in uploads:
            net.train().zero_grad()
            (net(embedding_of(client), personal["offset"]) - personal["offset"]).square().mean().backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight -= 1e-2 * weight.grad  # type: ignore[operator]
        net.eval()
        for client in ROSTER:
            found = server_half(plan).personal(state, client, ROSTER, facts)
            expected = net(embedding_of(client), torch.zeros(SHAPE)).detach()
            assert found.keys() == {"offset"}
            torch.testing.assert_close(found["offset"], expected, rtol=1e-5, atol=1e-6)
            assert not torch.allclose(found["offset"], uploads[0][1]["offset"])

    @pytest.mark.parametrize("generator", [{}, {"optimizer": "adam", "lr": 1e-3}, {"inputs": "embedding+offset"}])
    def test_the_network_goes_on_learning_from_round_to_round(self, generator: dict[str, Any]) -> None:
        plan, uploads = small_plan(offset_aggregation="network", generator=generator), uploads_of("a", "b")
        trainer, state = GeneratorTrainer(plan, options_of(plan).generator), None
        for _ in range(3):
            state, facts = finished(plan, uploads, state)
            for client, personal in uploads:
                trainer.regress(embedding_of(client), personal["offset"])
        for client, personal in uploads:
            found = server_half(plan).personal(state, client, ROSTER, facts)["offset"]
            assert torch.equal(found, trainer.emit(embedding_of(client), personal["offset"]))

    def test_a_coordinator_that_is_asked_for_several_states_answers_from_the_right_one(self) -> None:
        plan, uploads, states, facts = small_plan(offset_aggregation="network"), uploads_of("a", "b"), [], {}
        for _ in range(2):
            state, facts = finished(plan, uploads, states[-1] if states else None)
            states.append(state)
        server = server_half(plan)
        for state in (*states, *states):
            expected = server_half(plan).personal(state, ROSTER[0], ROSTER, facts)["offset"]
            assert torch.equal(server.personal(state, ROSTER[0], ROSTER, facts)["offset"], expected)
            server.finish(state, state.shared, uploads, ROSTER, facts)  # and training on does not change what was asked
            assert torch.equal(server.personal(state, ROSTER[0], ROSTER, facts)["offset"], expected)

    def test_the_regression_goes_towards_what_was_uploaded(self) -> None:
        plan = small_plan(offset_aggregation="network", generator={"steps": 20, "optimizer": "adam", "lr": 1e-2})
        client, target = ROSTER[0], 0.9 * torch.ones(SHAPE)
        state, facts = finished(plan, [(client, {"offset": target})])
        untrained = GeneratorTrainer(plan, options_of(plan).generator).emit(embedding_of(client), target)
        found = server_half(plan).personal(state, client, ROSTER, facts)["offset"]
        assert float((found - target).square().mean()) < 0.5 * float((untrained - target).square().mean())

    def test_clients_with_equal_class_counts_get_equal_offsets(self) -> None:
        plan, twin = small_plan(offset_aggregation="network"), record("d", *ROSTER[0].class_counts)
        roster, server = [*ROSTER, twin], server_half(plan)
        facts, start = server.facts(roster), server.initial_state()
        state = server.finish(start, start.shared, uploads_of("a", "b"), roster, facts)
        found = {client.id: server.personal(state, client, roster, facts)["offset"] for client in roster}
        assert torch.equal(found["a"], found["d"])
        assert not torch.equal(found["a"], found["b"])

    @pytest.mark.parametrize("inputs", ["embedding", "embedding+offset"])
    def test_a_client_that_came_late_gets_an_offset_too(self, inputs: str) -> None:
        plan = small_plan(offset_aggregation="network", generator={"inputs": inputs})
        state, facts = finished(plan, uploads_of("a", "b"))
        late = ROSTER[2]
        trainer = GeneratorTrainer(plan, options_of(plan).generator)
        for client, personal in uploads_of("a", "b"):
            trainer.regress(embedding_of(client), personal["offset"])
        start = initial_offset(plan, options_of(plan), late.id)
        found = server_half(plan).personal(state, late, ROSTER, facts)
        assert_equal(found, {"offset": trainer.emit(embedding_of(late), start)})

    def test_a_network_that_sees_offsets_is_given_each_clients_last_one(self) -> None:
        plan = small_plan(offset_aggregation="network", generator={"inputs": "embedding+offset"})
        first, facts = finished(plan, uploads_of("a", "b", "c"))
        newer = [(ROSTER[0], {"offset": torch.randn(SHAPE)})]
        second, _ = finished(plan, newer, first)
        trainer = GeneratorTrainer(plan, options_of(plan).generator)
        last = {client.id: personal["offset"] for client, personal in uploads_of("a", "b", "c")}
        for client, personal in [*uploads_of("a", "b", "c"), *newer]:
            trainer.regress(embedding_of(client), personal["offset"])
        last["a"] = newer[0][1]["offset"]
        for client in ROSTER:  # b and c were absent: their last offsets are kept
            found = server_half(plan).personal(second, client, ROSTER, facts)["offset"]
            assert torch.equal(found, trainer.emit(embedding_of(client), last[client.id]))

    def test_offsets_that_the_network_does_not_need_are_not_kept(self) -> None:
        state, _ = finished(small_plan(offset_aggregation="network"), uploads_of("a", "b"))
        assert state.private
        assert all(name.startswith("generator.") for name in state.private)

    def test_a_client_that_has_left_the_roster_still_counts_for_its_own_upload(self) -> None:
        plan = small_plan(offset_aggregation="network")
        server, start = server_half(plan), server_half(plan).initial_state()
        left, remaining = ROSTER[0], ROSTER[1:]
        state = server.finish(start, start.shared, uploads_of("a"), remaining, server.facts(remaining))
        trainer = GeneratorTrainer(plan, options_of(plan).generator)
        trainer.regress(embedding_of(left), uploads_of("a")[0][1]["offset"])
        assert_equal(state.private, {f"generator.{name}": value for name, value in trainer.state().items()})

    def test_a_start_from_the_generator_never_changes(self) -> None:
        plan = small_plan(offset_aggregation="network", offset_init="generator")
        server = server_half(plan)
        facts, start = server.facts(ROSTER), server.initial_state()
        state, _ = finished(plan, uploads_of("a", "b", "c"))
        untrained = GeneratorTrainer(plan, options_of(plan).generator)
        for client in ROSTER:
            expected = untrained.emit(embedding_of(client), torch.zeros(SHAPE))
            assert_equal(server.personal(start, client, ROSTER, facts), {"initial_offset": expected})
            later = server.personal(state, client, ROSTER, {"offset_aggregation": "none"})
            assert_equal(later, {"initial_offset": expected})


@pytest.mark.parametrize(
    ("aggregation", "generator"),
    [
        ("none", {}),
        ("network", {}),
        ("network", {"inputs": "embedding+offset"}),
        ("network", {"mix": 0.0}),
        ("network", {"mix": 0.5, "inputs": "embedding+offset"}),
    ],
)
def test_no_client_is_sent_what_another_one_uploaded_or_would_be_sent(
    aggregation: str, generator: dict[str, Any]
) -> None:
    plan = small_plan(offset_aggregation=aggregation, generator=generator)
    uploads = uploads_of("a", "b", "c")
    state, facts = finished(plan, uploads)
    sent = everyone_gets(plan, state, facts)
    for client, uploaded in uploads:
        (own,) = sent[client.id].values()
        for name, personal in sent.items():
            if name != client.id:
                assert not any(torch.equal(value, uploaded["offset"]) for value in personal.values())
                assert not any(torch.equal(value, own) for value in personal.values())
        if generator.get("mix") == 0:
            assert torch.equal(own, uploaded["offset"])


@pytest.mark.parametrize(
    ("aggregation", "generator"),
    [("none", {}), ("mean", {}), ("network", {}), ("network", {"inputs": "embedding+offset", "optimizer": "adam"})],
)
def test_a_round_can_be_finished_again_with_the_same_result(aggregation: str, generator: dict[str, Any]) -> None:
    plan = small_plan(offset_aggregation=aggregation, generator=generator)
    first, facts = finished(plan, uploads_of("a", "b"))
    before = copy.deepcopy(first)
    once, again = (finished(plan, uploads_of("b", "c"), first)[0] for _ in range(2))
    assert_equal(once.private, again.private)
    assert_equal(first.private, before.private)  # the state before the round is still what it was
    assert_equal(first.shared, before.shared)
    sent, sent_again = (everyone_gets(plan, once, facts) for _ in range(2))
    for name in sent:
        assert_equal(sent[name], sent_again[name])


def test_every_client_starts_from_one_model() -> None:
    """Unlike in the authors' code, where each client draws its own head."""
    server = server_half(plan_with())
    assert_equal(server.initial_state().shared, build_double(plan_with(), 0.3).state_dict())


def test_given_weights_take_the_random_ones_place() -> None:
    plan = plan_with()
    given = {name: torch.full_like(value, 0.25) for name, value in build_double(plan, 0.3).state_dict().items()}
    assert_equal(server_half(plan).initial_state(given).shared, given)
