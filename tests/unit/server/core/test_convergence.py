import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core.convergence import is_near_end, more_rounds

ROUNDS = 60


def curve(rate: float, rounds: int = ROUNDS, noise: float = 0.0) -> dict[int, float]:
    """Return accuracies that approach 90 % from 10 %, faster with a higher rate; the noise alternates."""
    return {done: 0.9 - 0.8 * math.exp(-rate * done) + noise * (-1) ** done for done in range(1, rounds + 1)}


@pytest.mark.parametrize(("rounds", "more"), [(60, 20), (61, 21), (5, 5), (9, 5), (300, 100)])
def test_a_rising_line_asks_for_as_many_rounds_as_it_was_fitted_to(rounds: int, more: int) -> None:
    assert more_rounds({done: 0.2 + 0.5 * done / rounds for done in range(1, rounds + 1)}, rounds) == more


def test_a_curve_that_has_not_saturated_asks_for_more() -> None:
    assert more_rounds(curve(rate=0.03), ROUNDS) == 20
    assert more_rounds(curve(rate=0.03, noise=0.02), ROUNDS) == 20


def test_a_saturated_curve_asks_for_none() -> None:
    """Early progress does not count, however steep."""
    assert more_rounds(curve(rate=0.2), ROUNDS) is None
    assert more_rounds(curve(rate=0.2, noise=0.02), ROUNDS) is None


@pytest.mark.parametrize(("gain", "more"), [(0.0049, None), (0.0051, 20)])
def test_half_a_point_over_the_next_third_is_worth_it(gain: float, more: int | None) -> None:
    assert more_rounds({done: 0.5 + gain / 20 * done for done in range(1, ROUNDS + 1)}, ROUNDS) == more


def test_a_slope_within_the_noise_does_not_count() -> None:
    """The fitted slope is 0.0007 per round, its standard error 0.0008: t = 0.86, p = 0.2. It would gain 1.4 points."""
    accuracies = {done: 0.5 + 0.0004 * done + 0.02 * (-1) ** done for done in range(41, 61)}
    assert more_rounds(accuracies, ROUNDS) is None
    assert more_rounds({done: accuracy - 0.02 * (-1) ** done for done, accuracy in accuracies.items()}, ROUNDS) == 20


@pytest.mark.parametrize("falling", [0.0, -0.01])
def test_a_constant_or_falling_accuracy_asks_for_none(falling: float) -> None:
    assert more_rounds({done: 0.9 + falling * done for done in range(1, ROUNDS + 1)}, ROUNDS) is None


def test_fewer_than_five_measured_models_among_the_last_rounds_say_nothing() -> None:
    rising = {done: done / 100 for done in (1, 2, 3, 4, 5, 6, 41, 50, 55, 60)}
    assert more_rounds(rising, ROUNDS) is None
    assert more_rounds(rising | {57: 0.57}, ROUNDS) == 20
    assert more_rounds({}, ROUNDS) is None


@given(accuracies=st.dictionaries(st.integers(0, 40), st.floats(0, 1)), rounds=st.integers(1, 40))
def test_any_history_gets_an_answer(accuracies: dict[int, float], rounds: int) -> None:
    assert more_rounds(accuracies, rounds) in (None, max(5, math.ceil(rounds / 3)))


@pytest.mark.parametrize(
    ("done", "total", "near"), [(53, 60, False), (54, 60, True), (60, 60, True), (8, 9, False), (9, 9, True)]
)
def test_the_end_is_near_when_a_tenth_is_left(done: int, total: int, near: bool) -> None:
    assert is_near_end(done, total) is near
