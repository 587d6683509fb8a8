"""The site's own model."""

import pytest
import torch
from support.digit_sites import PLAN, digits_data, digits_plan, federation_model
from support.tensors import assert_same_tensors
from support.tiny import NORMED

from client_agent.serving.baseline import LocalBaseline
from shared.contract.errors import DistransError
from shared.learning.methods.base import TrainingContext, TrainingInterrupted

DATA = digits_data(25, 0)
ALONE = LocalBaseline(PLAN, "north")
CONTEXT = TrainingContext(DATA.train)


def never() -> bool:
    return False


def test_a_rounds_steps_are_those_of_the_federation() -> None:
    assert ALONE.steps_per_round(25) == 4
    assert LocalBaseline(digits_plan(epochs=3), "north").steps_per_round(25) == 12
    normed = PLAN.model_copy(update={"model": PLAN.model.model_copy(update={"backbone": NORMED})})
    assert LocalBaseline(normed, "north").steps_per_round(25) == 3  # BatchNorm skips a last batch of one image


def test_training_is_repeatable_and_depends_on_the_steps_before() -> None:
    start = ALONE.start()
    first, done = ALONE.advance(start, 0, 5, CONTEXT, never)
    assert done == 5
    assert_same_tensors(first, ALONE.advance(start, 0, 5, CONTEXT, never)[0])
    other, _ = ALONE.advance(start, 5, 5, CONTEXT, never)
    assert not torch.equal(first["logits.bias"], other["logits.bias"])


def test_an_interruption_keeps_the_steps_taken() -> None:
    looks: list[None] = []

    def is_time_up() -> bool:
        looks.append(None)
        return len(looks) > 2

    weights, done = ALONE.advance(ALONE.start(), 0, 5, CONTEXT, is_time_up)
    assert done == 2
    assert_same_tensors(weights, ALONE.advance(ALONE.start(), 0, 2, CONTEXT, never)[0])
    with pytest.raises(TrainingInterrupted):
        ALONE.advance(ALONE.start(), 0, 5, CONTEXT, lambda: True)


def test_diverged_weights_are_never_returned() -> None:
    plan = digits_plan(lr=100.0, weight_decay=1.0)
    wild = LocalBaseline(plan, "north")
    with pytest.raises(DistransError, match="diverged"):
        wild.advance(wild.start(), 0, 200, CONTEXT, never)


def test_pretrained_weights_are_a_start_for_the_site_too() -> None:
    plan = PLAN.model_copy(update={"model": PLAN.model.model_copy(update={"weights": "file"})})
    given = {name: torch.ones_like(value) for name, value in federation_model(0).shared.items()}
    start = LocalBaseline(plan, "north").start(given)
    assert bool((start["backbone.0.weight"] == 1).all())
    assert not bool((start["logits.weight"] == 1).any())
    assert_same_tensors(ALONE.start(given), ALONE.start())
