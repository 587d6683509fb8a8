import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from support.distrans import (
    ROSTER,
    RULES,
    SHAPE,
    digits,
    plan_with,
    record,
    small_plan,
    task_for,
    train,
    uploads_of,
)
from support.halves import server_half
from support.tensor_data import TensorData
from support.tensors import assert_same_tensors, differ
from torch import Tensor

from shared.contract.plan import validate_plan
from shared.learning.methods import client_half
from shared.learning.methods.base import (
    RoundContext,
    RoundTask,
    TrainingContext,
    TrainingInterrupted,
)
from shared.learning.methods.tensor_half import TensorState
from shared.learning.model import build_double
from shared.learning.offsets import relative_motion
from shared.learning.runtime import Runtime


@dataclass
class Watched:
    """Data that counts the batches it has yielded."""

    data: TensorData
    yielded: list[int] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return self.data.samples

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.data.batches(size, seed):
            self.yielded.append(len(labels))
            yield images, labels


class TestClient:
    def test_next_round_starts_from_the_kept_offset(self) -> None:
        frozen, kept = plan_with(offset_lr=0), torch.randn(SHAPE)
        _, private = train(frozen, private={"offset": kept, "initial_offset": torch.zeros(SHAPE)})
        assert torch.equal(private["offset"], kept)

    @pytest.mark.parametrize("aggregation", ["mean", "network"])
    def test_coordinator_s_offset_replaces_the_kept_one(self, aggregation: str) -> None:
        plan = plan_with(offset_lr=0, offset_aggregation=aggregation)
        sent, task = torch.randn(SHAPE), task_for(plan)
        task = RoundTask("a", 1, task.shared, {"offset": sent}, task.facts)
        update, _ = train(plan, private={"offset": torch.randn(SHAPE)}, task=task)
        assert torch.equal(update.personal["offset"], sent)

    def test_lost_private_state_falls_back_to_the_initial_offset(self) -> None:
        plan = plan_with(offset_lr=1.0)
        first, private = train(plan)
        begun = task_for(plan)
        task = RoundTask("a", 1, first.shared, begun.personal, begun.facts)
        start = begun.personal["initial_offset"]
        lost, kept = train(plan, private={}, task=task), train(plan, private=private, task=task)
        expected = train(plan, private={"offset": start, "initial_offset": start}, task=task)
        assert_same_tensors(lost[0].shared, expected[0].shared)
        assert_same_tensors(lost[1], expected[1])
        assert differ(lost[0].shared, kept[0].shared)

    def test_lost_private_state_resumes_from_the_coordinator_s_backup(self) -> None:
        plan = plan_with(offset_optimizer="adam", offset_bound=1.0, bounded_clients="all", offset_backup=True)
        server, begun, roster = server_half(plan), task_for(plan), [record("a", *[5] * len(plan.classes))]
        first, private = train(plan, task=begun)
        uploads = [(roster[0], first.personal)]
        state = server.finish(server.initial_state(), first.shared, uploads, RoundContext(roster, begun.facts))
        personal = server.personal(state, roster[0], RoundContext(roster, begun.facts))
        assert torch.equal(personal["offset_backup"], private["offset"])
        task = RoundTask("a", 2, first.shared, personal, begun.facts)
        kept, lost = train(plan, private=private, task=task), train(plan, private={}, task=task)
        assert_same_tensors(lost[0].shared, kept[0].shared)
        assert_same_tensors(lost[1], kept[1])

    @pytest.mark.parametrize("aggregation", ["none", "mean", "network"])
    def test_backup_is_the_last_upload_under_every_aggregation(self, aggregation: str) -> None:
        plan, uploads = small_plan(offset_backup=True), uploads_of("a", "b")
        server, older = server_half(plan), TensorState({}, {"offset.of.a": torch.ones(SHAPE)})
        state = server.finish(older, {}, uploads, RoundContext(ROSTER, {"offset_aggregation": aggregation}))
        for client, uploaded in uploads:
            personal = server.personal(state, client, RoundContext(ROSTER, {"offset_aggregation": "none"}))
            assert torch.equal(personal["offset_backup"], uploaded["offset"])
        assert "offset_backup" not in server.personal(
            state, ROSTER[2], RoundContext(ROSTER, {"offset_aggregation": "none"})
        )

    def test_offset_is_uploaded_without_aggregation_only_for_a_backup(self) -> None:
        for backup in (False, True):
            plan = plan_with(offset_backup=backup)
            update, _ = train(plan)
            assert ("offset" in update.personal) is backup
            assert ("personal.offset" in server_half(plan).update_spec(task_for(plan).facts).entries) is backup

    def test_motion_is_measured_from_the_very_first_offset(self) -> None:
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

    def test_motion_from_a_zero_offset_is_its_rms(self) -> None:
        update, private = train(plan_with(offset_init="zeros", offset_optimizer="adam"))
        assert update.report.offset_motion == pytest.approx(float(private["offset"].square().mean().sqrt()))
        assert update.report.offset_motion

    @pytest.mark.parametrize("rule", RULES)
    def test_interrupted_training_changes_nothing(self, rule: str) -> None:
        plan = plan_with(offset_optimizer="adam", update_rule=rule)
        task, private, data = task_for(plan), {"offset": torch.randn(SHAPE)}, Watched(digits())
        before = copy.deepcopy((task.shared, task.personal, private))
        random_state = torch.get_rng_state()
        context = TrainingContext(data, should_stop=lambda: len(data.yielded) == 4)
        with pytest.raises(TrainingInterrupted):
            client_half(plan).train(task, private, context)
        assert len(data.yielded) == 4
        for found, expected in zip((task.shared, task.personal, private), before, strict=True):
            assert_same_tensors(found, expected)
        assert torch.equal(torch.get_rng_state(), random_state)

    def test_training_does_not_modify_its_arguments_and_is_repeatable_to_the_bit(self) -> None:
        plan = plan_with(offset_optimizer="adam")
        task, private = task_for(plan), {"offset": torch.randn(SHAPE), "initial_offset": torch.ones(SHAPE)}
        before = copy.deepcopy((task.shared, task.personal, private))
        once = train(plan, private=private, task=task)
        for found, expected in zip((task.shared, task.personal, private), before, strict=True):
            assert_same_tensors(found, expected)
        again = train(plan, private=private, task=task)
        assert_same_tensors(once[0].shared, again[0].shared)
        assert_same_tensors(once[1], again[1])

    def test_predictions_use_the_global_model_and_the_client_s_own_offset(self) -> None:
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
    def test_predictions_use_the_coordinator_s_offset_not_the_one_just_trained(self, aggregation: str) -> None:
        plan, sent, images = plan_with(offset_aggregation=aggregation), torch.randn(SHAPE), digits().images[:6]
        task = task_for(plan)
        task = RoundTask("a", 1, task.shared, {"offset": sent}, task.facts)
        predictor = client_half(plan).predictor(task, {"offset": torch.randn(SHAPE)}, Runtime())
        net = build_double(plan, 0.3).eval()
        net.load_state_dict(task.shared)
        assert torch.equal(predictor(images), net(images, sent).detach())

    def test_a_plan_of_another_method_is_refused(self) -> None:
        plan = validate_plan({"name": "x", "classes": ["a", "b"], "method": {"name": "fedavg"}})
        for half in (type(server_half(plan_with()).half), type(client_half(plan_with()))):
            with pytest.raises(TypeError, match="fedavg"):
                half(plan)


def test_all_clients_start_from_the_same_model() -> None:
    """Unlike in the authors' code, where each client draws its own head."""
    server = server_half(plan_with())
    assert_same_tensors(server.initial_state().shared, build_double(plan_with(), 0.3).state_dict())


def test_given_weights_replace_the_random_ones() -> None:
    plan = plan_with()
    given = {name: torch.full_like(value, 0.25) for name, value in build_double(plan, 0.3).state_dict().items()}
    assert_same_tensors(server_half(plan).initial_state(given).shared, given)
