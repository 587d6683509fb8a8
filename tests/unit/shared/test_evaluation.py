import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from shared.evaluation import Evaluation
from shared.measuring import evaluate
from shared.problems import DistransError
from shared.schemas import MAX_LOSS
from shared.tensor_data import TensorData

NOTHING = Evaluation(samples=0, correct=0, loss_sum=0.0)
CLASSES = 4


def answers_written_on_the_images(images: Tensor) -> Tensor:
    """A predictor whose answer is the value of an image's only pixel."""
    return torch.nn.functional.one_hot(images.reshape(-1).long(), CLASSES).float()


def batches_of(pairs: list[tuple[int, int]], size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """(answer, label) pairs as batches of images."""
    images = torch.tensor([answer for answer, _ in pairs]).float().reshape(-1, 1, 1, 1)
    labels = torch.tensor([label for _, label in pairs])
    return [(images[start : start + size], labels[start : start + size]) for start in range(0, len(pairs), size)]


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


# Own classes are 0 and 1. Positives: three of four right. Negatives: one of five right, three taken for an own class.
PAIRS = [(0, 0), (1, 1), (1, 1), (3, 0), (2, 2), (0, 2), (1, 3), (0, 3), (2, 3)]


def test_counts_and_accuracies_by_hand() -> None:
    found = evaluate(answers_written_on_the_images, batches_of(PAIRS), {0, 1})
    assert (found.samples, found.correct) == (9, 4)
    assert (found.negatives, found.negatives_correct, found.negatives_as_own) == (5, 1, 3)
    assert found.accuracy == pytest.approx(4 / 9)
    assert found.positive_accuracy == pytest.approx(3 / 4)
    assert found.negative_accuracy == pytest.approx(1 / 5)
    assert found.binary_accuracy == pytest.approx(0.5 * (3 / 4 + 1 - 3 / 5))


def test_the_loss_is_summed_over_images_not_over_batches() -> None:
    right, wrong = math.log(math.e + 3) - 1, math.log(math.e + 3)
    for size in (1, 2, 4, 9):
        found = evaluate(answers_written_on_the_images, batches_of(PAIRS, size), {0, 1})
        assert found.loss_sum == pytest.approx(4 * right + 5 * wrong, rel=1e-5)


def test_a_predictor_that_always_names_its_own_class_scores_one_half_on_as_many_negatives() -> None:
    found = evaluate(answers_written_on_the_images, batches_of([(0, 0), (0, 0), (0, 1), (0, 2)]), {0})
    assert (found.accuracy, found.positive_accuracy, found.negative_accuracy) == (0.5, 1.0, 0.0)
    assert found.binary_accuracy == 0.5


def test_without_negatives_there_is_no_negative_and_no_binary_accuracy() -> None:
    found = evaluate(answers_written_on_the_images, batches_of([(0, 0), (1, 0)]), {0, 1})
    assert (found.accuracy, found.positive_accuracy) == (0.5, 0.5)
    assert (found.negative_accuracy, found.binary_accuracy) == (None, None)


def test_without_positives_there_is_no_positive_and_no_binary_accuracy() -> None:
    found = evaluate(answers_written_on_the_images, batches_of([(2, 2), (1, 2)]), {0, 1})
    assert (found.accuracy, found.negative_accuracy) == (0.5, 0.5)
    assert (found.positive_accuracy, found.binary_accuracy) == (None, None)


def test_a_client_without_classes_has_negatives_only() -> None:
    found = evaluate(answers_written_on_the_images, batches_of([(0, 0), (1, 0)]), set())
    assert (found.samples, found.negatives, found.negatives_as_own) == (2, 2, 0)


def test_no_images_give_no_accuracy() -> None:
    data = TensorData(torch.zeros(0, 1, 1, 1), torch.zeros(0, dtype=torch.int64))
    for batches in ([], data.batches(8, seed=0)):
        found = evaluate(answers_written_on_the_images, batches, {0})
        assert found == NOTHING
        assert (found.accuracy, found.positive_accuracy, found.binary_accuracy) == (None, None, None)


@given(one=evaluations(), two=evaluations(), three=evaluations())
def test_adding_adds_every_count(one: Evaluation, two: Evaluation, three: Evaluation) -> None:
    assert (one + two) + three == three + (two + one)
    assert one + NOTHING == one
    for name in Evaluation.model_fields:
        assert getattr(one + two, name) == getattr(one, name) + getattr(two, name)


def test_the_limits_are_for_one_report_and_not_for_sums() -> None:
    most = Evaluation(samples=2**28, correct=2**28, loss_sum=1e6 * 2**28)
    total = sum([most] * 5, NOTHING)
    assert (total.samples, total.accuracy, total.loss_sum) == (5 * 2**28, 1.0, 5e6 * 2**28)
    for fields in ({"samples": 2**28 + 1}, {"samples": True}, {"samples": "5"}, {"loss_sum": math.inf}):
        with pytest.raises(ValidationError):
            Evaluation.model_validate({"samples": 5, "correct": 1, "loss_sum": 1.0} | fields)


@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20), cut=st.integers(0, 20))
def test_the_evaluation_of_a_whole_is_the_sum_of_its_parts(pairs: list[tuple[int, int]], cut: int) -> None:
    whole, first, second = (
        evaluate(answers_written_on_the_images, batches_of(part), {1, 2}) for part in (pairs, pairs[:cut], pairs[cut:])
    )
    together = first + second
    assert together.loss_sum == pytest.approx(whole.loss_sum, rel=1e-5)
    assert together.model_copy(update={"loss_sum": 0.0}) == whole.model_copy(update={"loss_sum": 0.0})


def test_finite_logits_with_an_infinite_loss_are_the_models_fault() -> None:
    def absurd(images: Tensor) -> Tensor:
        return torch.tensor([2.5e38, -2.5e38, 0.0, 0.0]).expand(len(images), -1)

    with pytest.raises(DistransError, match="loss is not finite"):
        evaluate(absurd, batches_of([(0, 0), (0, 1)]), {0, 1})


def test_a_huge_loss_is_limited_and_still_counts() -> None:
    def bad(images: Tensor) -> Tensor:
        return torch.tensor([3.75e6, -3.75e6, 0.0, 0.0]).expand(len(images), -1)

    found = evaluate(bad, batches_of([(0, 1), (0, 1)]), {0, 1})
    assert (found.samples, found.correct, found.loss_sum) == (2, 0, 2 * MAX_LOSS)
