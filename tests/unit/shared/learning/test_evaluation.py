import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_data import TensorData
from torch import Tensor

from shared.contract.errors import DistransError
from shared.contract.limits import MAX_LOSS
from shared.contract.measurements import Evaluation
from shared.learning.evaluation import evaluate

NOTHING = Evaluation(samples=0, correct=0, loss_sum=0.0)
CLASSES = 4


def read_answers(images: Tensor) -> Tensor:
    """Predict the value of an image's only pixel."""
    return torch.nn.functional.one_hot(images.reshape(-1).long(), CLASSES).float()


def batches_of(pairs: list[tuple[int, int]], size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return (answer, label) pairs as batches of one-pixel images."""
    images = torch.tensor([answer for answer, _ in pairs]).float().reshape(-1, 1, 1, 1)
    labels = torch.tensor([label for _, label in pairs])
    return [(images[start : start + size], labels[start : start + size]) for start in range(0, len(pairs), size)]


# Own classes are 0 and 1. Positives: 3 of 4 correct. Negatives: 1 of 5 correct, 3 predicted as an own class.
PAIRS = [(0, 0), (1, 1), (1, 1), (3, 0), (2, 2), (0, 2), (1, 3), (0, 3), (2, 3)]


def test_counts_and_accuracies_match_values_worked_out_by_hand() -> None:
    found = evaluate(read_answers, batches_of(PAIRS), {0, 1})
    assert (found.samples, found.correct) == (9, 4)
    assert (found.negatives, found.negatives_correct, found.negatives_as_own) == (5, 1, 3)
    assert found.accuracy == pytest.approx(4 / 9)
    assert found.positive_accuracy == pytest.approx(3 / 4)
    assert found.negative_accuracy == pytest.approx(1 / 5)
    assert found.binary_accuracy == pytest.approx(0.5 * (3 / 4 + 1 - 3 / 5))


def test_loss_is_summed_over_images_not_batches() -> None:
    right, wrong = math.log(math.e + 3) - 1, math.log(math.e + 3)
    for size in (1, 2, 4, 9):
        found = evaluate(read_answers, batches_of(PAIRS, size), {0, 1})
        assert found.loss_sum == pytest.approx(4 * right + 5 * wrong, rel=1e-5)


def test_always_predicting_the_own_class_scores_one_half() -> None:
    found = evaluate(read_answers, batches_of([(0, 0), (0, 0), (0, 1), (0, 2)]), {0})
    assert (found.accuracy, found.positive_accuracy, found.negative_accuracy) == (0.5, 1.0, 0.0)
    assert found.binary_accuracy == 0.5


def test_negative_and_binary_accuracy_need_negatives() -> None:
    found = evaluate(read_answers, batches_of([(0, 0), (1, 0)]), {0, 1})
    assert (found.accuracy, found.positive_accuracy) == (0.5, 0.5)
    assert (found.negative_accuracy, found.binary_accuracy) == (None, None)


def test_positive_and_binary_accuracy_need_positives() -> None:
    found = evaluate(read_answers, batches_of([(2, 2), (1, 2)]), {0, 1})
    assert (found.accuracy, found.negative_accuracy) == (0.5, 0.5)
    assert (found.positive_accuracy, found.binary_accuracy) == (None, None)


def test_client_without_classes_has_only_negatives() -> None:
    found = evaluate(read_answers, batches_of([(0, 0), (1, 0)]), set())
    assert (found.samples, found.negatives, found.negatives_as_own) == (2, 2, 0)


def test_accuracy_needs_images() -> None:
    data = TensorData(torch.zeros(0, 1, 1, 1), torch.zeros(0, dtype=torch.int64))
    for batches in ([], data.batches(8, seed=0)):
        found = evaluate(read_answers, batches, {0})
        assert found == NOTHING
        assert (found.accuracy, found.positive_accuracy, found.binary_accuracy) == (None, None, None)


@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20), cut=st.integers(0, 20))
def test_evaluation_is_the_sum_of_its_parts(pairs: list[tuple[int, int]], cut: int) -> None:
    whole, first, second = (
        evaluate(read_answers, batches_of(part), {1, 2}) for part in (pairs, pairs[:cut], pairs[cut:])
    )
    together = first + second
    assert together.loss_sum == pytest.approx(whole.loss_sum, rel=1e-5)
    assert together.model_copy(update={"loss_sum": 0.0}) == whole.model_copy(update={"loss_sum": 0.0})


def test_finite_logits_with_an_infinite_loss_are_rejected() -> None:
    def absurd(images: Tensor) -> Tensor:
        return torch.tensor([2.5e38, -2.5e38, 0.0, 0.0]).expand(len(images), -1)

    with pytest.raises(DistransError, match="loss is not finite"):
        evaluate(absurd, batches_of([(0, 0), (0, 1)]), {0, 1})


def test_huge_loss_is_capped_and_still_counts() -> None:
    def bad(images: Tensor) -> Tensor:
        return torch.tensor([3.75e6, -3.75e6, 0.0, 0.0]).expand(len(images), -1)

    found = evaluate(bad, batches_of([(0, 1), (0, 1)]), {0, 1})
    assert (found.samples, found.correct, found.loss_sum) == (2, 0, 2 * MAX_LOSS)
