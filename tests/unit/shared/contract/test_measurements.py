import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.contract.measurements import Evaluation

NOTHING = Evaluation(samples=0, correct=0, loss_sum=0.0)


@st.composite
def evaluations(draw: st.DrawFn) -> Evaluation:
    negatives = draw(st.integers(0, 50))
    positives, right = draw(st.integers(0, 50)), draw(st.integers(0, negatives))
    as_own = draw(st.integers(0, negatives - right))
    return Evaluation(
        samples=positives + negatives,
        correct=right + draw(st.integers(0, positives)),
        loss_sum=draw(st.integers(0, 100)) / 4,
        negatives=negatives,
        negatives_correct=right,
        negatives_as_own=as_own,
    )


@given(one=evaluations(), two=evaluations(), three=evaluations())
def test_sum_adds_every_count(one: Evaluation, two: Evaluation, three: Evaluation) -> None:
    assert (one + two) + three == three + (two + one)
    assert one + NOTHING == one
    for name in Evaluation.model_fields:
        assert getattr(one + two, name) == getattr(one, name) + getattr(two, name)


def test_limits_apply_to_one_report_not_to_sums() -> None:
    most = Evaluation(samples=2**28, correct=2**28, loss_sum=1e6 * 2**28)
    total = sum([most] * 5, NOTHING)
    assert (total.samples, total.accuracy, total.loss_sum) == (5 * 2**28, 1.0, 5e6 * 2**28)
    for fields in ({"samples": 2**28 + 1}, {"samples": True}, {"samples": "5"}, {"loss_sum": math.inf}):
        with pytest.raises(ValidationError):
            Evaluation.model_validate({"samples": 5, "correct": 1, "loss_sum": 1.0} | fields)
