import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.contract.measurements import Evaluation, EvaluationReport, PairedCounts

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


PAIRED = {"samples": 10, "both": 5, "only_served": 2, "only_alone": 1, "neither": 2}


def test_report_carries_paired_counts_and_the_candidate() -> None:
    body = {"samples": 5, "correct": 1, "loss_sum": 1.0, "paired": PAIRED, "candidate": "offset+prior & alone"}
    report = EvaluationReport.model_validate_json(json.dumps(body))
    assert report.paired == PairedCounts(**PAIRED)
    assert (report.paired.served_correct, report.paired.alone_correct) == (7, 6)
    assert report + NOTHING == Evaluation(samples=5, correct=1, loss_sum=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"both": 6},
        {"both": 7, "only_alone": -1},
        {"both": True, "only_served": 6},
        {"samples": 2**28 + 1, "both": 2**28 - 4},
        {"extra": 0},
    ],
)
def test_paired_counts_are_bounded_and_add_up(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        PairedCounts.model_validate(PAIRED | wrong)


@pytest.mark.parametrize("name", ["x" * 65, "two\nlines", "\x1b[2J"])
def test_candidate_is_a_short_printable_name(name: str) -> None:
    with pytest.raises(ValidationError):
        EvaluationReport(samples=0, correct=0, loss_sum=0.0, candidate=name)
