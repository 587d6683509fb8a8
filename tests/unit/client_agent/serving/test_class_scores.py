"""How each class is recognized."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client_agent.serving.class_scores import MAX_CLASSES, score_classes

CLASSES = ("cat", "dog", "eel", "fox")


def test_a_worked_example() -> None:
    """Four cats, of which one is taken for a dog; two dogs, one taken for an eel, which has no images."""
    probabilities = torch.tensor(
        [
            [0.8, 0.1, 0.1, 0.0],
            [0.7, 0.2, 0.1, 0.0],
            [0.6, 0.3, 0.1, 0.0],
            [0.3, 0.6, 0.1, 0.0],
            [0.2, 0.7, 0.1, 0.0],
            [0.1, 0.4, 0.5, 0.0],
        ]
    )
    scores, confusion = score_classes(probabilities, torch.tensor([0, 0, 0, 0, 1, 1]), CLASSES)
    cat, dog = scores
    assert (cat.label, cat.images, cat.sensitivity, cat.specificity, cat.auc) == ("cat", 4, 0.75, 1.0, 1.0)
    assert (dog.label, dog.images, dog.sensitivity, dog.specificity) == ("dog", 2, 0.5, 0.75)
    assert dog.auc == pytest.approx(7 / 8)  # of the 8 pairs, only (0.4 dog, 0.6 cat) is in the wrong order
    assert confusion == [("cat", "cat", 3), ("cat", "dog", 1), ("dog", "dog", 1), ("dog", "eel", 1)]


def test_one_class_alone_has_no_specificity() -> None:
    scores, confusion = score_classes(torch.eye(4)[[2, 2]], torch.tensor([2, 2]), CLASSES)
    (eel,) = scores
    assert (eel.sensitivity, eel.specificity, eel.auc) == (1.0, None, None)
    assert confusion == [("eel", "eel", 2)]


def test_without_images_or_with_too_many_classes_there_is_nothing_to_show() -> None:
    assert score_classes(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), CLASSES) == ([], [])
    many = MAX_CLASSES + 1
    names = tuple(map(str, range(many)))
    assert score_classes(torch.eye(many), torch.arange(many), names) == ([], [])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_the_confusion_matrix_counts_every_image_once(pairs: list[tuple[int, int]]) -> None:
    labels, predicted = (torch.tensor(part) for part in zip(*pairs, strict=True))
    scores, confusion = score_classes(torch.eye(4)[predicted], labels, CLASSES)
    assert sum(images for *_, images in confusion) == len(pairs)
    assert sum(one.images for one in scores) == len(pairs)
    for one in scores:
        right = sum(images for label, found, images in confusion if label == found == one.label)
        assert one.sensitivity == pytest.approx(right / one.images)
