"""Whether a federation's accuracy was still rising when its rounds were over."""

import math
from collections.abc import Mapping

_LEAST_MODELS = 5  # fewer points say little about a slope
_LEVEL = 0.05
_WORTHWHILE = 0.005  # gain in accuracy


def is_near_end(rounds_done: int, rounds_total: int) -> bool:
    """Return whether at most a tenth of the rounds is left."""
    return rounds_done >= rounds_total - rounds_total // 10


def last_rounds(rounds_total: int) -> int:
    """Return how many of the last rounds show whether the accuracy is still rising: a third, but at least 5."""
    return max(_LEAST_MODELS, math.ceil(rounds_total / 3))


def more_rounds(accuracies: Mapping[int, float], rounds_total: int) -> int | None:
    """Return how many more rounds would help; None if the accuracy no longer rises, or too little is known.

    `accuracies` are pooled accuracies by number of completed rounds. A line through those of the last rounds must rise
    beyond noise (t-test of its slope, p < 0.05), and must gain half a point if it went on for as many rounds again.
    """
    window = last_rounds(rounds_total)
    recent = {done: accuracy for done, accuracy in accuracies.items() if done > rounds_total - window}
    if len(recent) < _LEAST_MODELS:
        return None
    from scipy.stats import linregress  # takes half a second to import

    line = linregress(list(recent), list(recent.values()), alternative="greater")
    is_rising = line.pvalue < _LEVEL and line.slope * window >= _WORTHWHILE
    return window if is_rising else None
