"""What the gate finds out about a model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from client_agent.data.holdout import split_holdout
from client_agent.serving.assessment import Assessment, assess, unmeasured
from client_agent.serving.candidates import Base
from client_agent.serving.class_counts import ClassCounts
from client_agent.serving.measurement import Measured
from shared.contract.errors import DistransError

CLASSES = ("cat", "dog", "eel")
COUNTS = ClassCounts((10, 10, 0), (100, 100, 100))


def measured(count: int, seed: int = 0, **skill: float) -> Measured:
    """Return random logits, with so much added at the right class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    right = torch.nn.functional.one_hot(labels, 3)
    logits: dict[Base, Tensor] = {
        Base(name): torch.randn(count, 3, generator=generator) + points * right for name, points in skill.items()
    }
    return Measured(logits, labels, split_holdout(labels, 0))


def examine(found: Measured) -> Assessment:
    return assess(found, COUNTS, CLASSES, own_classes=[0, 1])


GOOD_FEDERATION = {"global": 1.0, "offset": 5.0, "alone": 0.0}
BAD_FEDERATION = {"global": -4.0, "offset": -4.0, "alone": 6.0}


def test_one_half_chooses_and_the_other_tests() -> None:
    found = measured(200, **GOOD_FEDERATION)
    result = examine(found)
    report = result.report
    assert report is not None
    assert (report.holdout.validation, report.holdout.test) == (100, 100)
    assert (result.score and result.score.samples, result.tested and result.tested.samples) == (100, 100)
    assert result.with_offset is not None
    assert result.with_offset.samples == 200  # the coordinator compares models on everything
    test = found.holdout.test
    alone = found.logits[Base.ALONE][test].argmax(dim=1) == found.labels[test]
    assert report.alone is not None
    assert report.alone.correct == int(alone.sum())
    assert report.served.samples == 100


def test_the_test_images_do_not_influence_the_choice() -> None:
    found = measured(200, **GOOD_FEDERATION)
    other = {base: values.clone() for base, values in found.logits.items()}
    for values in other.values():
        values[found.holdout.test] = 0
    first, second = examine(found), examine(Measured(other, found.labels, found.holdout))
    assert first.candidate == second.candidate
    assert first.temperature == second.temperature
    assert first.score == second.score


def test_few_images_are_cross_fitted() -> None:
    result = examine(measured(40, **GOOD_FEDERATION))
    assert result.report is not None
    assert not result.report.holdout.is_split
    assert result.report.served.samples == 40
    assert result.score == result.tested


def test_joining_pays_off_and_the_verdict_says_so() -> None:
    verdict = examine(measured(300, **GOOD_FEDERATION)).report.verdict  # type: ignore[union-attr]
    assert verdict is not None
    assert verdict.outcome == "pays-off"
    assert "Joining pays off: +" in verdict.sentence
    assert verdict.paired.samples == 150


@pytest.mark.parametrize("count", [40, 300])
def test_a_federation_that_hurts_leaves_the_site_with_its_own_model(count: int) -> None:
    result = examine(measured(count, **BAD_FEDERATION))
    assert result.candidate.name == "alone"
    assert result.report is not None
    assert result.report.verdict is not None
    assert result.report.verdict.outcome == "better-alone"
    assert "its own model is served" in result.report.verdict.sentence


def test_without_an_own_model_there_is_no_verdict() -> None:
    report = examine(measured(100, **{"global": 1.0, "offset": 5.0})).report
    assert report is not None
    assert report.verdict is None
    assert report.alone is None


@settings(max_examples=25)
@given(st.integers(1, 120), st.integers(0, 2**32 - 1), st.tuples(*[st.floats(-5, 5)] * 4))
def test_findings_are_consistent(count: int, seed: int, skill: tuple[float, ...]) -> None:
    names = ("global", "offset", "adapted", "alone")
    result = examine(measured(count, seed, **dict(zip(names, skill, strict=True))))
    report = result.report
    assert report is not None
    assert report.verdict is not None
    assert report.alone is not None
    assert result.tested is not None
    paired = report.verdict.paired
    assert (paired.served_correct, paired.alone_correct) == (report.served.correct, report.alone.correct)
    assert result.tested.correct == report.served.correct
    assert report.served.interval.low <= (report.served.accuracy or 0) <= report.served.interval.high
    assert sum(images for label, found, images in report.confusion if label == found) == report.served.correct
    assert 0 <= (report.calibration_error or 0) <= 1
    assert 0.25 <= result.temperature <= 4


def test_a_diverged_model_is_an_error() -> None:
    found = measured(10, **GOOD_FEDERATION)
    found.logits[Base.OFFSET][0, 0] = float("nan")
    with pytest.raises(DistransError, match="not finite"):
        examine(found)


def test_a_personal_model_stands_in_for_the_global_one() -> None:
    result = examine(measured(100, personal=4.0, alone=0.0))
    assert result.report is not None
    assert result.with_offset == result.without_offset
    assert result.report.federation.correct > result.report.alone.correct  # type: ignore[union-attr]


def test_without_a_measurement_the_prior_is_used_if_it_is_known() -> None:
    bases = [Base.GLOBAL, Base.OFFSET, Base.ALONE]
    assert unmeasured(bases, COUNTS).candidate.name == "offset+prior"
    assert unmeasured(bases, ClassCounts()).candidate.name == "offset"
