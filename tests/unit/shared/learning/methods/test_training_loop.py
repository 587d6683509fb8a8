import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.tensor_data import TensorData
from torch import Tensor, nn

from shared.contract.errors import DistransError
from shared.contract.measurements import TrainingReport
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.methods.base import BatchProgress, RoundTask, TrainingContext, TrainingInterrupted
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, mean_loss, plain_step
from shared.learning.runtime import Runtime

PLAIN = nn.Linear(3, 2)
NORMED = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def make_plan(seed: int = 0, **training: Any) -> FederationPlan:
    return validate_plan({"name": "test", "preset": "paper", "classes": ["a", "b"], "seed": seed, "training": training})


def make_task(client_id: str = "site-1", number: int = 1) -> RoundTask:
    return RoundTask(client_id, number, shared={}, personal={})


def make_data(samples: int) -> TensorData:
    """Return images where number i is filled with i; labels alternate."""
    images = torch.arange(float(samples))[:, None].expand(samples, 3)
    return TensorData(images.reshape(samples, 3, 1, 1), torch.arange(samples) % 2)


class Steps:
    """A step that records its batches; it predicts class 0 for every image, and its loss is the step's number."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.draws: list[float] = []

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.batches.append([int(image) for image in x[:, 0, 0, 0]])
        self.draws.append(float(torch.rand(())))
        return torch.tensor([[1.0, 0.0]]).expand(len(y), 2), torch.tensor(float(len(self.batches)))


def run(
    samples: int,
    *,
    net: nn.Module = PLAIN,
    plan: FederationPlan | None = None,
    task: RoundTask | None = None,
    **context: Any,
) -> tuple[TrainingReport, Steps]:
    steps = Steps()
    training = LocalTraining(plan or make_plan(), task or make_task(), TrainingContext(make_data(samples), **context))
    return training.run(net, steps), steps


class SeedBook:
    """Data that records the seed of each pass."""

    samples = 1

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.seeds.append(seed)
        yield from make_data(1).batches(size, seed)


def seeds_of(seed: int, client_id: str, number: int, epochs: int) -> list[int]:
    book = SeedBook()
    training = LocalTraining(make_plan(seed, epochs=epochs), make_task(client_id, number), TrainingContext(book))
    training.run(PLAIN, Steps())
    return book.seeds


class TestSeeds:
    def test_every_pass_has_its_own_seed(self) -> None:
        runs = itertools.product((0, 1), ("site-1", "site-2", "1"), (1, 2, 11))
        seeds = [seed for plan_seed, client_id, number in runs for seed in seeds_of(plan_seed, client_id, number, 3)]
        assert len(seeds) == 2 * 3 * 3 * 3
        assert len(set(seeds)) == len(seeds)

    def test_pass_is_repeatable(self) -> None:
        assert seeds_of(5, "site-1", 2, 3) == seeds_of(5, "site-1", 2, 3)
        assert seeds_of(5, "site-1", 2, 3)[:2] == seeds_of(5, "site-1", 2, 2)

    def test_batches_depend_on_client_and_round_only(self) -> None:
        plan = make_plan(epochs=2, batch_size=10)
        _, steps = run(20, plan=plan)
        for first, second in (steps.batches[:2], steps.batches[2:]):
            assert sorted(first + second) == list(range(20))
        assert steps.batches[:2] != steps.batches[2:]
        assert run(20, plan=plan)[1].batches == steps.batches
        assert run(20, plan=plan, task=make_task("site-2"))[1].batches != steps.batches
        assert run(20, plan=plan, task=make_task(number=2))[1].batches != steps.batches

    def test_random_draws_in_a_step_depend_on_client_and_round_only(self) -> None:
        plan = make_plan(batch_size=2)
        torch.manual_seed(1)
        _, steps = run(6, plan=plan)
        torch.manual_seed(2)
        assert run(6, plan=plan)[1].draws == steps.draws
        assert len(set(steps.draws)) == 3
        assert run(6, plan=plan, task=make_task("site-2"))[1].draws != steps.draws
        assert run(6, plan=plan, task=make_task(number=2))[1].draws != steps.draws

    def test_caller_s_random_state_is_restored(self) -> None:
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        run(6)
        assert torch.equal(torch.rand(3), expected)

    @pytest.mark.parametrize("failure", [TrainingInterrupted, ZeroDivisionError])
    def test_caller_s_random_state_is_restored_after_a_failure(self, failure: type[Exception]) -> None:
        def fail(_: BatchProgress) -> None:
            raise failure

        before = torch.get_rng_state()
        with pytest.raises(failure):
            run(6, plan=make_plan(batch_size=2), on_batch=fail)
        assert torch.equal(torch.get_rng_state(), before)


class TestBatches:
    @pytest.mark.parametrize(
        ("net", "samples", "sizes"),
        [
            (PLAIN, 5, [2, 2, 1]),
            (PLAIN, 4, [2, 2]),
            (PLAIN, 1, [1]),
            (NORMED, 5, [2, 2]),
            (NORMED, 4, [2, 2]),
            (NORMED, 3, [2]),
            (NORMED, 2, [2]),
        ],
    )
    def test_batchnorm_skips_a_last_batch_of_one_image(self, net: nn.Module, samples: int, sizes: list[int]) -> None:
        report, steps = run(samples, net=net, plan=make_plan(batch_size=2))
        assert [len(batch) for batch in steps.batches] == sizes
        assert report.batches == len(sizes)
        assert report.samples == samples

    def test_longer_last_batch_is_trained_on(self) -> None:
        _, steps = run(8, net=NORMED, plan=make_plan(batch_size=3))
        assert [len(batch) for batch in steps.batches] == [3, 3, 2]

    @pytest.mark.parametrize(("net", "samples", "least"), [(PLAIN, 0, 1), (NORMED, 0, 2), (NORMED, 1, 2)])
    def test_too_few_training_images_are_refused(self, net: nn.Module, samples: int, least: int) -> None:
        with pytest.raises(
            DistransError, match=f"has {samples} training images; lenet needs at least {least}"
        ) as caught:
            run(samples, net=net)
        assert caught.value.next_step == "Check the data folder."

    def test_batchnorm_refuses_batches_of_one_image(self) -> None:
        assert run(3, plan=make_plan(batch_size=1))[0].batches == 3
        with pytest.raises(DistransError, match="BatchNorm, which cannot normalize batches of one image") as caught:
            run(3, net=NORMED, plan=make_plan(batch_size=1))
        assert caught.value.next_step is not None
        assert "training.batch_size" in caught.value.next_step


def run_steps(samples: int, steps: int, net: nn.Module = PLAIN, **options: Any) -> tuple[TrainingReport, Steps]:
    recorded, plan = Steps(), make_plan(batch_size=4, epochs=7)
    training = LocalTraining(plan, make_task(), TrainingContext(make_data(samples)))
    return training.run(net, recorded, steps=steps, **options), recorded


class TestStepsInsteadOfEpochs:
    def test_new_pass_begins_when_one_is_over(self) -> None:
        report, recorded = run_steps(10, steps=5)
        assert (report.batches, [len(batch) for batch in recorded.batches]) == (5, [4, 4, 2, 4, 4])
        assert sorted(itertools.chain(*recorded.batches[:3])) == list(range(10))
        assert recorded.batches[3] != recorded.batches[0]

    def test_image_skipped_for_batchnorm_is_not_a_step(self) -> None:
        report, recorded = run_steps(9, steps=5, net=NORMED)
        assert (report.batches, [len(batch) for batch in recorded.batches]) == (5, [4] * 5)

    def test_reshuffled_batches_are_the_first_of_their_passes(self) -> None:
        _, recorded = run_steps(10, steps=4, reshuffle=True)
        assert [len(batch) for batch in recorded.batches] == [4] * 4
        assert len({tuple(batch) for batch in recorded.batches}) == 4
        assert recorded.batches[0] == run_steps(10, steps=1)[1].batches[0]

    def test_progress_counts_up_to_the_steps(self) -> None:
        seen: list[BatchProgress] = []
        context = TrainingContext(make_data(10), on_batch=seen.append)
        LocalTraining(make_plan(batch_size=4), make_task(), context).run(PLAIN, Steps(), steps=5)
        assert [(now.batch, now.batches, now.epoch) for now in seen] == [
            (1, 5, 0),
            (2, 5, 0),
            (3, 5, 0),
            (4, 5, 1),
            (5, 5, 1),
        ]


class TestProgress:
    def test_progress_reports_running_images_loss_and_accuracy(self) -> None:
        """Steps 1, 2, 3 … have a loss of 1, 2, 3 … per image and predict class 0."""
        seen: list[BatchProgress] = []
        report, steps = run(5, plan=make_plan(batch_size=2, epochs=2), on_batch=seen.append)
        images = list(itertools.accumulate(len(batch) for batch in steps.batches))
        losses = itertools.accumulate(number * len(batch) for number, batch in enumerate(steps.batches, 1))
        right = itertools.accumulate(sum(image % 2 == 0 for image in batch) for batch in steps.batches)
        assert [progress.epoch for progress in seen] == [0, 0, 0, 1, 1, 1]
        assert [progress.batch for progress in seen] == [1, 2, 3, 4, 5, 6]
        assert {progress.batches for progress in seen} == {6}
        assert [progress.images for progress in seen] == images == [2, 4, 5, 7, 9, 10]
        assert [progress.loss for progress in seen] == [a / b for a, b in zip(losses, images, strict=True)]
        assert [progress.accuracy for progress in seen] == [a / b for a, b in zip(right, images, strict=True)]
        assert (report.loss, report.accuracy) == (seen[-1].loss, seen[-1].accuracy) == (3.3, 0.6)

    @pytest.mark.parametrize("net", [PLAIN, NORMED], ids=["plain", "batchnorm"])
    @pytest.mark.parametrize("samples", [2, 3, 4, 5, 6, 7])
    def test_last_progress_is_the_last_batch(self, net: nn.Module, samples: int) -> None:
        seen: list[BatchProgress] = []
        report, _ = run(samples, net=net, plan=make_plan(batch_size=3, epochs=2), on_batch=seen.append)
        assert seen[-1].batch == seen[-1].batches == report.batches

    def test_final_report_counts_samples_and_batches(self) -> None:
        report, _ = run(7, plan=make_plan(batch_size=3, epochs=2))
        assert (report.samples, report.batches, report.offset_motion) == (7, 6, None)
        assert report.seconds >= 0


class TestStop:
    def test_stop_before_the_first_batch_trains_nothing(self) -> None:
        steps = Steps()
        with pytest.raises(TrainingInterrupted):
            LocalTraining(make_plan(), make_task(), TrainingContext(make_data(4), should_stop=lambda: True)).run(
                PLAIN, steps
            )
        assert steps.batches == []

    def test_stop_between_batches_interrupts_training(self) -> None:
        steps = Steps()
        context = TrainingContext(make_data(8), should_stop=lambda: len(steps.batches) == 2)
        with pytest.raises(TrainingInterrupted):
            LocalTraining(make_plan(batch_size=2), make_task(), context).run(PLAIN, steps)
        assert len(steps.batches) == 2


class TestDivergence:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_non_finite_loss_ends_training_as_diverged(self, bad: float, at: int) -> None:
        losses = [1.0, 1.0, 1.0]
        losses[at] = bad
        coming = iter(losses)

        def step(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(len(x), 2), torch.tensor(next(coming))

        with pytest.raises(DistransError, match="Training diverged") as caught:
            LocalTraining(make_plan(batch_size=2), make_task(), TrainingContext(make_data(6))).run(PLAIN, step)
        assert caught.value.next_step is not None
        assert "training.lr" in caught.value.next_step


class TestModelStepper:
    def step_from(self, loss: Callable[[Tensor], Tensor], start: float, steps: int = 1, **training: Any) -> float:
        net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(net.weight, start)
        stepper = ModelStepper(net, make_plan(**training), Runtime())
        assert stepper.loss_scale == 1
        for _ in range(steps):
            stepper.step(loss(net.weight).sum())
        return net.weight.item()

    def test_sgd_step_is_the_rate_times_the_gradient(self) -> None:
        assert self.step_from(torch.square, 3, lr=0.25) == 3 - 0.25 * 6

    def test_momentum_carries_over_between_steps(self) -> None:
        """With a constant gradient of 1, the steps are 1 and 1.5."""
        assert self.step_from(torch.clone, 0, steps=2, lr=1, momentum=0.5) == -2.5

    def test_weight_decay_shrinks_the_weight(self) -> None:
        assert self.step_from(torch.clone, 2, lr=0.5, weight_decay=0.25) == 2 - 0.5 * (1 + 0.25 * 2)

    @pytest.mark.parametrize(("clip_norm", "step"), [(None, 6), (100, 6), (1.5, 1.5)])
    def test_gradient_norm_is_clipped(self, clip_norm: float | None, step: float) -> None:
        limits = {} if clip_norm is None else {"clip_norm": clip_norm}
        assert self.step_from(torch.square, 3, lr=1, **limits) == pytest.approx(3 - step, abs=1e-5)

    def test_old_gradients_are_discarded_and_those_of_other_tensors_kept(self) -> None:
        net, other = nn.Linear(1, 1, bias=False), torch.tensor([2.0], requires_grad=True)
        nn.init.constant_(net.weight, 1)
        net.weight.grad = torch.full((1, 1), 100.0)
        other.grad = torch.tensor([10.0])
        ModelStepper(net, make_plan(lr=1), Runtime()).step((net.weight * other).sum())
        assert net.weight.item() == -1
        assert other.grad.tolist() == [11]


def test_plain_step_returns_the_logits_and_loss_before_the_update() -> None:
    net, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    expected = net(x).detach()
    start = net.weight.detach().clone()
    logits, loss = plain_step(net, ModelStepper(net, make_plan(lr=1), Runtime()), Runtime())(x, y)
    assert torch.equal(logits, expected)
    assert torch.equal(loss, nn.functional.cross_entropy(expected, y))
    assert not logits.requires_grad
    assert not torch.equal(net.weight, start)


def test_mean_loss_is_computed_in_float32() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    expected = nn.functional.cross_entropy(logits, labels)
    assert torch.equal(mean_loss(logits, labels), expected)
    rough = mean_loss(logits.bfloat16(), labels)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(expected.item(), rel=0.02)
