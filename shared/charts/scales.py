"""From values to coordinates: axes with round numbers, and lines reduced to what can be seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Scale:
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value; values outside land on the border."""
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def nice_ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Return round numbers that span the range: at most about `most`, at least two. `whole` allows integers only."""
    if not high > low:
        low, high = (low, low + 1) if whole else (low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1e-9)
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))
    step = max(1.0, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]


Point = tuple[float, float]


def decimate(points: Sequence[Point], buckets: int) -> list[Point]:
    """Return at most 2 · buckets + 2 of the points, sorted by x: the ends, and the extremes of each stretch."""
    if len(points) <= 2 * buckets + 2:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / buckets or 1.0
    kept = [points[0]]
    groups: dict[int, list[Point]] = {}
    for point in points[1:-1]:
        groups.setdefault(min(buckets - 1, int((point[0] - first) / width)), []).append(point)
    for group in groups.values():
        low, high = min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])
        kept.extend(sorted({low, high}))
    return [*kept, points[-1]]


def spread(items: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
