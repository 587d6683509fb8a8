"""Accuracies with their uncertainty, as reports print them."""

import statistics
from collections.abc import Sequence

from lab.simulation.final import Counts
from shared.learning.verdict import wilson

EXPLANATION = (
    "One seed: accuracy [95 % Wilson interval over the test images of all clients]. Several seeds: mean ± standard "
    "deviation over seeds (number of seeds)."
)


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Format as `0.812 ± 0.010 (3)`: mean, sample standard deviation, number of seeds."""
    if len(values) < 2:
        return format(values[0], form) if values else "–"
    return f"{statistics.fmean(values):{form}} ± {statistics.stdev(values):{form}} ({len(values)})"


def estimate(accuracies: Sequence[float], counts: Sequence[Counts]) -> str:
    """Format accuracies of one or more seeds as EXPLANATION says; `counts` are those of the same seeds, if known."""
    if len(accuracies) != 1 or len(counts) != 1:
        return spread(accuracies)
    interval = wilson(counts[0].correct, counts[0].samples)
    return f"{accuracies[0]:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
