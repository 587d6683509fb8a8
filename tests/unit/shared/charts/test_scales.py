from hypothesis import given
from hypothesis import strategies as st

from shared.charts.scales import decimate, nice_ticks, spread

FINITE = st.floats(-1e9, 1e9)


@given(FINITE, FINITE, st.integers(2, 9), st.booleans())
def test_ticks_span_the_range_in_equal_round_steps(one: float, other: float, most: int, whole: bool) -> None:
    low, high = sorted((round(one), round(other))) if whole else sorted((one, other))
    ticks = nice_ticks(low, high, most, whole=whole)
    room = 1e-6 * max(1.0, abs(low), abs(high))
    assert 2 <= len(ticks) <= most + 2
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low + room
    assert ticks[-1] >= high - room
    assert not whole or all(tick == int(tick) for tick in ticks)


def test_ticks_are_numbers_people_like() -> None:
    assert nice_ticks(0.23, 0.91) == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(1, 3, whole=True) == [1, 2, 3]


@given(st.lists(FINITE, min_size=1, max_size=400), st.integers(1, 50))
def test_decimated_lines_keep_their_ends_and_extremes(values: list[float], buckets: int) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = decimate(points, buckets)
    assert len(kept) <= 2 * buckets + 2
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(value for _, value in kept) == min(values)
    assert max(value for _, value in kept) == max(values)


@given(st.integers(1, 300), st.integers(2, 40))
def test_spread_keeps_the_first_and_the_last(count: int, most: int) -> None:
    kept = spread(range(count), most)
    assert len(kept) == min(count, most)
    assert len(set(kept)) == len(kept)
    assert (kept[0], kept[-1]) == (0, count - 1)
