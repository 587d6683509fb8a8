"""Which classes were predicted recently, against those that the site trained on: drift at a glance."""

import math
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PART = 100  # predictions that are forgotten together
PARTS = 10
_MIN_PREDICTIONS = 30  # fewer say nothing
_MIN_DISTANCE = 0.1
_NOISE_FACTOR = 3.0


class PredictedClasses:
    """Counts of predicted classes: all since the start, and the last thousand. Thread-safe.

    Nothing else is kept: no image, no file name, no time and no order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: Counter[int] = Counter()
        self._total = 0
        self._parts: deque[Counter[int]] = deque([Counter()], maxlen=PARTS)

    def add(self, classes: Iterable[int]) -> None:
        """Count predictions."""
        with self._lock:
            for one in classes:
                if self._total and self._total % PART == 0:
                    self._parts.append(Counter())
                self._parts[-1][one] += 1
                self._all[one] += 1
                self._total += 1

    def total(self) -> int:
        """Return how many predictions there were since the start."""
        return self._total

    def since_start(self) -> dict[int, int]:
        """Return the counts since the start, by class."""
        with self._lock:
            return dict(self._all)

    def recent(self) -> dict[int, int]:
        """Return the counts of the last predictions, by class: at most PART × PARTS, at least all but the last part."""
        with self._lock:
            return dict(sum(self._parts, Counter()))


@dataclass(frozen=True)
class Drift:
    """How far two class mixes are apart: the share of predictions that would have to be of another class."""

    predictions: int
    distance: float | None  # None if there are too few predictions to tell
    is_notable: bool = False  # more than chance explains, and enough to matter


def compare_mixes(trained: Sequence[int], predicted: Sequence[int]) -> Drift:
    """Compare counts per class of training images and predictions.

    The distance is half the sum of absolute differences between shares. Chance alone gives about half the sum of
    √(2 p (1 − p) / (π n)): what a class with share p deviates by, on average, among n predictions.
    """
    images, n = sum(trained), sum(predicted)
    if not images or n < _MIN_PREDICTIONS:
        return Drift(n, None)
    shares = [count / images for count in trained]
    distance = sum(abs(count / n - share) for count, share in zip(predicted, shares, strict=True)) / 2
    noise = sum(math.sqrt(2 * share * (1 - share) / (math.pi * n)) for share in shares) / 2
    return Drift(n, distance, distance > max(_MIN_DISTANCE, _NOISE_FACTOR * noise))
