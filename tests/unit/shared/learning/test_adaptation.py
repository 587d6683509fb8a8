"""Fine-tuning of a predicting model on a client's images."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.tensor_data import TensorData
from support.tensors import assert_same_tensors
from support.tiny import METHOD_CASES, NORMED, digits, first_task, method_plan, plan_for, site

from shared.learning.adaptation import adapt, adapted_predictor
from shared.learning.methods import client_half
from shared.learning.methods.base import RoundTask, TrainingContext, TrainingInterrupted
from shared.learning.methods.modules import detached_state
from shared.learning.priors import prior_shift
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors

DATA = digits(24)
PLAN = plan_for({"name": "distrans", "offset_aggregation": "none"})
HALF = client_half(PLAN)
OFFSET: Tensors = {"offset": torch.full((1, 16, 16), 0.5)}


def task() -> RoundTask:
    return first_task(PLAN, site("north", DATA))


def adapted(epochs: int = 2, *, head_only: bool = False, data: TensorData = DATA) -> Tensors:
    found = adapt(HALF, task(), OFFSET, TrainingContext(data), epochs=epochs, head_only=head_only)
    assert found is not None
    return found


def test_the_adapted_model_fits_the_clients_images_better() -> None:
    before = HALF.predictor(task(), OFFSET, Runtime())(DATA.images)
    after = adapted_predictor(HALF, task(), OFFSET, adapted(8), Runtime())(DATA.images)
    assert float(F.cross_entropy(after, DATA.labels)) < float(F.cross_entropy(before, DATA.labels)) - 0.1


def test_the_offset_stays_and_is_applied() -> None:
    weights = adapted()
    one = adapted_predictor(HALF, task(), OFFSET, weights, Runtime())
    other = adapted_predictor(HALF, task(), {"offset": torch.zeros(1, 16, 16)}, weights, Runtime())
    assert torch.equal(one.extras[0], OFFSET["offset"])
    assert not torch.allclose(one(DATA.images), other(DATA.images))


def test_with_the_head_only_everything_below_stays() -> None:
    start = task().shared
    changed = {name for name, value in adapted(head_only=True).items() if not torch.equal(value, start[name])}
    assert changed == {"logits.weight", "logits.bias"}
    assert len({name for name, value in adapted().items() if not torch.equal(value, start[name])}) > 2


def test_with_the_head_only_batchnorm_keeps_its_statistics() -> None:
    plan = plan_for({"name": "fedavg"}, backbone=NORMED)
    start = first_task(plan, site("north", DATA))
    found = adapt(client_half(plan), start, {}, TrainingContext(DATA), epochs=1, head_only=True)
    assert found is not None
    rest = {name: value for name, value in found.items() if not name.startswith("logits.")}
    assert_same_tensors(rest, {name: start.shared[name] for name in rest})


def test_the_loss_is_adjusted_by_the_prior() -> None:
    """One step of one batch, by hand: the gradient of the cross-entropy of shifted logits."""
    plan = plan_for({"name": "fedavg"}, training={"batch_size": 64, "lr": 0.1})
    few = TensorData(DATA.images[DATA.labels < 2], DATA.labels[DATA.labels < 2])
    start = replace(first_task(plan, site("north", few)), facts={"class_totals": "5,10,20,40"})
    found = adapt(client_half(plan), start, {}, TrainingContext(few), epochs=1)
    net = client_half(plan).predictor(start, {}, Runtime()).net.requires_grad_(True)  # type: ignore[attr-defined]
    shift = prior_shift(torch.bincount(few.labels, minlength=4), [5, 10, 20, 40])
    (images, labels), *_ = few.batches(64, seed=0)
    F.cross_entropy(net(images) + shift, labels).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
    assert found is not None
    expected = detached_state(net)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_runs_agree_to_the_bit() -> None:
    assert_same_tensors(adapted(), adapted())


def test_an_interrupted_run_leaves_the_epochs_before() -> None:
    """It stops in the third epoch of three batches each."""
    kept: dict[int, Tensors] = {}
    batches = []
    context = TrainingContext(DATA, Runtime(), batches.append, lambda: len(batches) == 7)
    with pytest.raises(TrainingInterrupted):
        adapt(HALF, task(), OFFSET, context, epochs=5, on_epoch=kept.__setitem__)
    assert list(kept) == [1, 2]
    assert_same_tensors(kept[2], adapted(2))


@pytest.mark.parametrize("name", METHOD_CASES)
def test_every_method_can_be_adapted_or_says_that_it_cannot(name: str) -> None:
    plan = method_plan(METHOD_CASES[name])
    half, start = client_half(plan), first_task(plan, site("north", DATA))
    found = adapt(half, start, {}, TrainingContext(DATA), epochs=1)
    assert (found is None) == (plan.method.name in ("pfedme", "pfedhn", "pfedhn-pc", "fedaws"))
    if found is not None:
        assert bool(adapted_predictor(half, start, {}, found, Runtime())(DATA.images).isfinite().all())
        assert adapt(half, start, {}, TrainingContext(DATA), epochs=1, head_only=True) is not None
