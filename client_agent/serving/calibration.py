"""Calibrated probabilities: a temperature fitted to validation images, and how far off probabilities are.

Guo et al. (2017), On calibration of modern neural networks, ICML. The temperature works on probabilities, p^(1/T)
renormalized, which for a single model is the same as dividing its logits by T.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from client_agent.state.records import CalibrationBin

MIN_IMAGES = 10  # with fewer, probabilities stay as they are
LOWEST, HIGHEST = 0.25, 4.0  # beyond, a few lucky or unlucky images decide
_SEARCH_STEPS = 50
_GOLDEN = (5**0.5 - 1) / 2
_BINS = 15


def apply_temperature(probabilities: Tensor, temperature: float) -> Tensor:
    """Return p^(1/T), renormalized; exactly the same probabilities for T = 1."""
    return probabilities if temperature == 1 else torch.softmax(log_probabilities(probabilities) / temperature, dim=1)


def log_probabilities(probabilities: Tensor) -> Tensor:
    """Return finite logarithms, also of 0."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature from LOWEST to HIGHEST that gives the labels the highest likelihood; 1 for few images."""
    if len(labels) < MIN_IMAGES:
        return 1.0
    logs = log_probabilities(probabilities.double())

    def loss(sharpness: float) -> float:
        return float(torch.nn.functional.cross_entropy(sharpness * logs, labels))

    # The loss is convex in 1/T: golden-section search finds its minimum.
    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(_SEARCH_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return 2 / (low + high)


def calibration_of(probabilities: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that applies the temperature fitted to these images."""
    temperature = fit_temperature(probabilities, labels)
    return lambda found: apply_temperature(found, temperature)


def calibration_bins(probabilities: Tensor, labels: Tensor) -> list[CalibrationBin]:
    """Return how often predictions of a given confidence are right, in up to 15 bins of equal width."""
    confidence, predicted = probabilities.double().max(dim=1)
    correct = (predicted == labels).double()
    places = (confidence * _BINS).long().clamp_max(_BINS - 1)
    found = []
    for place in places.unique().tolist():
        inside = places == place
        means = float(confidence[inside].mean()), float(correct[inside].mean())
        found.append(CalibrationBin(confidence=means[0], accuracy=means[1], images=int(inside.sum())))
    return found


def expected_calibration_error(bins: Sequence[CalibrationBin]) -> float | None:
    """Return the mean distance between confidence and accuracy; None without images."""
    images = sum(one.images for one in bins)
    return sum(one.images * abs(one.confidence - one.accuracy) for one in bins) / images if images else None
