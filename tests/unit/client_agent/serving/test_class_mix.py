import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_agent.serving.class_mix import PART, PARTS, PredictedClasses, compare_mixes


@given(st.lists(st.lists(st.integers(0, 4), max_size=300), max_size=12))
def test_recent_counts_are_those_of_the_last_predictions(requests: list[list[int]]) -> None:
    counts, everything = PredictedClasses(), [one for request in requests for one in request]
    for request in requests:
        counts.add(request)
    recent = counts.recent()
    kept = sum(recent.values())
    assert min(len(everything), PART * (PARTS - 1)) <= kept <= PART * PARTS
    assert recent == {one: everything[-kept:].count(one) for one in everything[-kept:]} if kept else recent == {}
    assert counts.total() == len(everything)
    assert counts.since_start() == {one: everything.count(one) for one in everything}


def test_the_distance_of_a_worked_example() -> None:
    drift = compare_mixes([50, 50, 0], [60, 20, 20])
    assert drift.distance == pytest.approx((0.1 + 0.3 + 0.2) / 2)
    assert drift.is_notable


def test_what_chance_explains_is_not_notable() -> None:
    """Two equal classes: the mean of |X/n − ½| is about √(1 / (2 π n)), 0.07 for n = 30."""
    assert compare_mixes([10, 10], [20, 10]).distance == pytest.approx(1 / 6)
    assert math.sqrt(0.5 / (math.pi * 30)) == pytest.approx(0.073, abs=0.001)
    assert not compare_mixes([10, 10], [20, 10]).is_notable
    assert compare_mixes([10, 10], [200, 100]).is_notable


def test_a_difference_too_small_to_matter_is_not_notable() -> None:
    assert not compare_mixes([500, 500], [45_000, 55_000]).is_notable


@pytest.mark.parametrize(("trained", "predicted"), [([5, 5], [20, 9]), ([0, 0], [50, 50])])
def test_too_few_images_say_nothing(trained: list[int], predicted: list[int]) -> None:
    assert compare_mixes(trained, predicted).distance is None


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=1, max_size=20))
def test_the_distance_is_a_share_and_zero_for_the_same_mix(pairs: list[tuple[int, int]]) -> None:
    trained, predicted = [one for one, _ in pairs], [other for _, other in pairs]
    distance = compare_mixes(trained, predicted).distance
    assert distance is None or 0 <= distance <= 1
    same = compare_mixes(trained, [count * 30 for count in trained])
    assert same.distance == pytest.approx(0)
    assert not same.is_notable
