"""Intervals of accuracies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.experiments.intervals import estimate, wilson
from lab.simulation.final import Counts


@pytest.mark.parametrize(
    ("correct", "samples", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (412, 500, 0.7882, 0.8549)],
)
def test_wilson_intervals_are_the_published_ones(correct: int, samples: int, low: float, high: float) -> None:
    assert wilson(Counts(samples, correct)) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(0, 10_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_interval_contains_the_share_and_narrows_with_more_images(counts: tuple[int, int]) -> None:
    samples, correct = counts
    low, high = wilson(Counts(samples, correct))
    assert 0 <= low <= high <= 1
    if samples:
        assert low <= correct / samples + 1e-12
        assert correct / samples <= high + 1e-12
        wider = wilson(Counts(10 * samples, 10 * correct))
        assert wider[1] - wider[0] < high - low


def test_one_seed_has_an_interval_and_several_have_a_spread() -> None:
    assert estimate([0.8], [Counts(10, 8)]) == "0.800 [0.490, 0.943]"
    assert estimate([0.8], []) == "0.800"  # stored before images were counted
    assert estimate([0.4, 0.6], [Counts(10, 4), Counts(10, 6)]) == "0.500 ± 0.141 (2)"
    assert estimate([], []) == "–"
