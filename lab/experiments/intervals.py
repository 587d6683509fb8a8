"""Accuracies with their uncertainty, as reports print them."""

import math
import statistics
from collections.abc import Sequence

from lab.simulation.final import Counts

_Z = 1.959964  # 95 %
EXPLANATION = (
    "One seed: accuracy [95 % Wilson interval over the test images of all clients]. Several seeds: mean ± standard "
    "deviation over seeds (number of seeds)."
)


def wilson(counts: Counts) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share; all of 0 … 1 without images."""
    n = counts.samples
    if not n:
        return 0.0, 1.0
    share, square = counts.correct / n, _Z**2
    center = (share + square / (2 * n)) / (1 + square / n)
    half = _Z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n**2))
    return max(0.0, center - half), min(1.0, center + half)


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Format as `0.812 ± 0.010 (3)`: mean, sample standard deviation, number of seeds."""
    if len(values) < 2:
        return format(values[0], form) if values else "–"
    return f"{statistics.fmean(values):{form}} ± {statistics.stdev(values):{form}} ({len(values)})"


def estimate(accuracies: Sequence[float], counts: Sequence[Counts]) -> str:
    """Format accuracies of one or more seeds as EXPLANATION says; `counts` are those of the same seeds, if known."""
    if len(accuracies) != 1 or len(counts) != 1:
        return spread(accuracies)
    low, high = wilson(counts[0])
    return f"{accuracies[0]:.3f} [{low:.3f}, {high:.3f}]"
