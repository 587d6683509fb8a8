import math

import pytest

from shared.charts import formats


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (0.25, "250 ms"), (1.5, "1.5 s"), (59.7, "1 min"), (61, "1 min 1 s"), (3900, "1 h 5 min")],
)  # fmt: skip
def test_durations_have_at_most_two_units(seconds: float, shown: str) -> None:
    assert formats.duration(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1200, "1.2 kB"), (999_600, "1 MB"), (123_456_789, "123 MB"), (5e15, "5,000 TB")]
)  # fmt: skip
def test_sizes_have_a_readable_unit(size: float, shown: str) -> None:
    assert formats.size(size) == shown


def test_numbers_that_are_none_are_shown_as_missing() -> None:
    for function in (formats.percent, formats.points, formats.plain, formats.count, formats.duration, formats.size):
        assert function(math.nan) == function(math.inf) == formats.MISSING


def test_differences_show_their_sign() -> None:
    assert formats.points(0.031) == "+3.1 points"
    assert formats.points(-0.2) == "−20.0 points"
