import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.learning.priors import NEVER, exclude_unseen, log_prior, prior_shift

Counts = st.lists(st.integers(0, 1000), min_size=2, max_size=6)


def test_every_count_is_smoothed_by_one() -> None:
    assert log_prior([2, 0]).tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 4)])


def test_shift_is_the_difference_of_log_priors() -> None:
    shift = prior_shift(there=[8, 0], trained=[4, 4])
    assert shift.tolist() == pytest.approx([math.log(9 / 10) - math.log(1 / 2), math.log(1 / 10) - math.log(1 / 2)])


@given(Counts)
def test_same_counts_shift_nothing(counts: list[int]) -> None:
    assert prior_shift(counts, counts).abs().max() == 0


@given(Counts)
def test_shift_turns_the_trained_prior_into_the_wanted_one(counts: list[int]) -> None:
    """A model that knows nothing predicts the frequencies it was trained with; shifted, those of the site."""
    trained = [5] * len(counts)
    found = torch.softmax(log_prior(trained) + prior_shift(counts, trained), dim=0)
    torch.testing.assert_close(found, log_prior(counts).exp())


def test_only_classes_without_images_are_excluded() -> None:
    assert exclude_unseen([3, 0, 1]).tolist() == [0, NEVER, 0]
