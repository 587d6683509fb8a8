"""Intervals of accuracies."""

from lab.experiments.intervals import estimate
from lab.simulation.final import Counts


def test_one_seed_has_an_interval_and_several_have_a_spread() -> None:
    assert estimate([0.8], [Counts(10, 8)]) == "0.800 [0.490, 0.943]"
    assert estimate([0.8], []) == "0.800"  # stored before images were counted
    assert estimate([0.4, 0.6], [Counts(10, 4), Counts(10, 6)]) == "0.500 ± 0.141 (2)"
    assert estimate([], []) == "–"
