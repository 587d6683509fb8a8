import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.halves import server_half
from support.tensor_data import TensorData
from support.tensors import assert_same_tensors
from torch import Tensor

from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.methods import client_half
from shared.learning.methods.base import (
    BatchProgress,
    ClientRecord,
    RoundContext,
    RoundTask,
    TrainingContext,
    TrainingInterrupted,
    Update,
)
from shared.learning.methods.training_loop import make_sgd
from shared.learning.model import build_single
from shared.tensors.mean import RunningMean
from shared.tensors.spec import Spec

CLASSES = 3
Tensors = dict[str, Tensor]
Images = tuple[Tensor, Tensor]


def plan_with(backbone: str = "lenet", side: int = 14, averaging: str = "uniform", **training: Any) -> FederationPlan:
    return validate_plan(
        {
            "name": "fedavg",
            "preset": "learned-offset",
            "classes": [str(number) for number in range(CLASSES)],
            "averaging": averaging,
            "image": {"channels": 1, "height": side, "width": side},
            "model": {"backbone": backbone, "activation": "relu"},
            "method": {"name": "fedavg"},
            "training": {"lr": 0.05, "batch_size": 4, **training},
        }
    )


def images_of(count: int, seed: int, side: int = 14) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, side, side, generator=generator)
    return TensorData(images, torch.randint(CLASSES, (count,), generator=generator))


@dataclass
class Recorded:
    """Data that records the batches it has yielded."""

    data: TensorData
    given: list[Images] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return self.data.samples

    def batches(self, size: int, seed: int) -> Iterator[Images]:
        for batch in self.data.batches(size, seed):
            self.given.append(batch)
            yield batch


def train(
    plan: FederationPlan, shared: Tensors, data: TensorData | Recorded, client: str = "a", number: int = 0
) -> Update:
    update, private = client_half(plan).train(RoundTask(client, number, shared, {}), {}, TrainingContext(data))
    assert (update.personal, private) == ({}, {})
    return update


def mean_of(plan: FederationPlan, updates: list[Update]) -> Tensors:
    server, mean = server_half(plan), RunningMean()
    for update in updates:
        server.fold(mean, update.shared, record_of(update.report.samples))
    state = server.finish(server.initial_state(), mean.result(), [], RoundContext([], {}))
    assert state.private == {}
    return state.shared


def record_of(images: int) -> ClientRecord:
    return ClientRecord("a", (images, 0))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_single_client_equals_centralized_sgd_to_the_bit(options: dict[str, float]) -> None:
    plan, data = plan_with(epochs=2, **options), Recorded(images_of(10, seed=1))
    shared = server_half(plan).initial_state().shared
    central = build_single(plan)
    for number in range(2):
        data.given.clear()
        shared = mean_of(plan, [train(plan, shared, data, number=number)])
        assert [len(labels) for _, labels in data.given] == [4, 4, 2, 4, 4, 2]
        optimizer = torch.optim.SGD(central.parameters(), lr=0.05, **options)  # type: ignore[arg-type]  # new each round
        for images, labels in data.given:
            optimizer.zero_grad()
            F.cross_entropy(central(images), labels).backward()
            optimizer.step()
        assert_same_tensors(shared, central.state_dict())


def test_full_batch_step_weighted_by_samples_equals_a_step_on_the_union() -> None:
    plan = plan_with(averaging="samples", batch_size=100)
    parts = [images_of(count, seed=count) for count in (3, 5, 11)]
    start = server_half(plan).initial_state().shared
    found = mean_of(plan, [train(plan, start, part) for part in parts])
    central = build_single(plan)
    images, labels = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    optimizer = make_sgd(central, plan.training)
    F.cross_entropy(central(images), labels).backward()
    optimizer.step()
    uniform = mean_of(plan_with(batch_size=100), [train(plan, start, part) for part in parts])
    for name, value in central.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert not all(torch.allclose(uniform[name], value, rtol=1e-5, atol=1e-6) for name, value in found.items())


@pytest.mark.parametrize(("averaging", "expected"), [("samples", 2.5), ("uniform", 2.0)])
def test_mean_is_weighted_as_the_plan_says(averaging: str, expected: float) -> None:
    server, mean = server_half(plan_with(averaging=averaging)), RunningMean()
    for samples in (1, 3):
        server.fold(mean, {"w": torch.tensor([float(samples)])}, record_of(samples))
    assert mean.result()["w"].tolist() == [expected]


@given(values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=6), samples=st.integers(1, 1000))
def test_weighting_makes_no_difference_with_equally_many_images(values: list[float], samples: int) -> None:
    results = []
    for averaging in ("samples", "uniform"):
        server, mean = server_half(plan_with(averaging=averaging)), RunningMean()
        for value in values:
            server.fold(mean, {"w": torch.tensor([value])}, record_of(samples))
        results.append(mean.result()["w"])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)


def test_mean_of_equal_clients_is_their_model_to_the_bit() -> None:
    plan = plan_with()
    update = train(plan, server_half(plan).initial_state().shared, images_of(8, seed=0))
    for averaging in ("uniform", "samples"):
        assert_same_tensors(mean_of(plan_with(averaging=averaging), [update] * 3), update.shared)


@pytest.mark.parametrize("averaging", ["uniform", "samples"])
def test_mean_does_not_depend_on_the_order_of_clients(averaging: str) -> None:
    plan = plan_with(averaging=averaging)
    start = server_half(plan).initial_state().shared
    updates = [train(plan, start, images_of(3 + seed, seed), client=str(seed)) for seed in range(4)]
    first, *others = (mean_of(plan, list(order)) for order in itertools.permutations(updates))
    for other in others:
        assert_same_tensors(other, first)


def test_batchnorm_statistics_are_averaged_and_counters_stay_integers() -> None:
    plan = plan_with("resnet18", side=8)
    start = server_half(plan).initial_state().shared
    updates = [train(plan, start, images_of(count, seed=count, side=8)) for count in (4, 8, 12)]  # 1, 2 and 3 batches
    found = mean_of(plan, updates)
    counter, running = "backbone.bn1.num_batches_tracked", "backbone.bn1.running_var"
    assert [int(update.shared[counter]) for update in updates] == [1, 2, 3]
    assert (found[counter].dtype, int(found[counter])) == (torch.int64, 2)
    expected = torch.stack([update.shared[running] for update in updates]).double().mean(dim=0).float()
    torch.testing.assert_close(found[running], expected, rtol=1e-6, atol=0)
    assert int(mean_of(plan, updates[:2] + updates[1:2])[counter]) == 2  # 5/3, rounded rather than truncated
    build_single(plan).load_state_dict(found)


def test_last_batch_of_one_image_is_skipped_with_batchnorm() -> None:
    plan, data = plan_with("resnet18", side=8), images_of(5, seed=0, side=8)
    report = train(plan, server_half(plan).initial_state().shared, data).report
    assert (report.batches, report.samples) == (1, 5)
    without_batchnorm = plan_with()
    start = server_half(without_batchnorm).initial_state().shared
    assert train(without_batchnorm, start, images_of(5, seed=0)).report.batches == 2


@pytest.mark.parametrize(
    ("images", "batch_size", "words"), [(1, 4, "has 1 training images"), (6, 1, "training.batch_size")]
)
def test_batchnorm_refuses_to_train_on_single_images(images: int, batch_size: int, words: str) -> None:
    plan = plan_with("resnet18", side=8, batch_size=batch_size)
    with pytest.raises(DistransError, match=words):
        train(plan, server_half(plan).initial_state().shared, images_of(images, seed=0, side=8))


def test_site_without_images_cannot_train() -> None:
    plan = plan_with()
    with pytest.raises(DistransError, match="has 0 training images"):
        train(plan, server_half(plan).initial_state().shared, images_of(0, seed=0))


def test_non_finite_loss_is_an_error_with_advice() -> None:
    plan, data = plan_with(), images_of(12, seed=0)
    data = TensorData(data.images * 1e38, data.labels)  # overflows float32 after a few layers
    with pytest.raises(DistransError, match=r"diverged.*training\.lr"):
        train(plan, server_half(plan).initial_state().shared, data)


def test_report_and_progress_match_the_batches() -> None:
    plan, seen = plan_with(lr=0.0, epochs=2), list[BatchProgress]()
    data, start = images_of(10, seed=0), server_half(plan).initial_state().shared
    update, _ = client_half(plan).train(RoundTask("a", 0, start, {}), {}, TrainingContext(data, on_batch=seen.append))
    net = build_single(plan)
    net.load_state_dict(start)
    logits = net(data.images)
    report = update.report
    assert (report.samples, report.batches, report.offset_motion) == (10, 6, None)
    assert report.loss == pytest.approx(float(F.cross_entropy(logits, data.labels).detach()), rel=1e-5)
    assert report.accuracy == pytest.approx(float((logits.argmax(dim=1) == data.labels).float().mean()))
    assert [(now.epoch, now.batch, now.batches, now.images) for now in seen] == [
        (0, 1, 6, 4),
        (0, 2, 6, 8),
        (0, 3, 6, 10),
        (1, 4, 6, 14),
        (1, 5, 6, 18),
        (1, 6, 6, 20),
    ]
    assert (seen[-1].loss, seen[-1].accuracy) == (pytest.approx(report.loss), pytest.approx(report.accuracy))


def test_interrupted_training_does_not_modify_its_arguments() -> None:
    plan, data = plan_with(), Recorded(images_of(12, seed=0))
    start = server_half(plan).initial_state().shared
    before = copy.deepcopy(start)
    with pytest.raises(TrainingInterrupted):
        client_half(plan).train(
            RoundTask("a", 0, start, {}), {}, TrainingContext(data, should_stop=lambda: len(data.given) > 1)
        )
    assert len(data.given) == 2
    assert_same_tensors(start, before)


def test_training_is_repeatable_to_the_bit_and_differs_by_client_and_round() -> None:
    plan, data = plan_with(), images_of(12, seed=0)
    start = server_half(plan).initial_state().shared
    once, again = train(plan, start, data), train(plan, start, data)
    assert_same_tensors(once.shared, again.shared)
    for client, number in (("b", 0), ("a", 1)):
        other = train(plan, start, data, client, number)
        assert not torch.equal(other.shared["logits.weight"], once.shared["logits.weight"])


def test_every_client_predicts_with_the_global_model_in_eval_mode() -> None:
    plan = plan_with("resnet18", side=8)
    server, data = server_half(plan), images_of(4, seed=0, side=8)
    state = server.initial_state()
    record = ClientRecord("a", (1, 1, 1))
    assert server.personal(state, record, RoundContext([record], server.facts([record]))) == {}
    net = build_single(plan).eval()
    net.load_state_dict(state.shared)
    predictor = client_half(plan).predictor(RoundTask("a", 0, state.shared, {}), {}, TrainingContext(data).runtime)
    assert torch.equal(predictor(data.images), net(data.images).detach())


def test_update_matches_its_spec() -> None:
    plan = plan_with("resnet18", side=8)
    server = server_half(plan)
    update = train(plan, server.initial_state().shared, images_of(4, seed=0, side=8))
    entries = server.update_spec({}).entries
    assert entries.keys() == {f"shared.{name}" for name in update.shared}
    for name, tensor in update.shared.items():
        assert entries[f"shared.{name}"] == Spec.of({name: tensor}).entries[name]
