"""The paper's two motivating examples: regressions at two clients with different true weights.

An input x is shifted to x + p·x + q, where p is fixed and each client has its own q.

1. f(x) = cos(w·x): each client's loss over w. A brute-force search finds the pair (q₁, q₂) with the smallest mean gap
   between the two clients' losses.
2. f(x) = w·x with two weights: a federation with gradient steps on w and, with offsets, on q. A constant shift of x
   can only add a constant to a linear model's output, so it helps only if the clients' noise has a nonzero mean.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_SAMPLES, _NOISE = 200, 0.1


@dataclass(frozen=True)
class CosineExample:
    """Losses (2 clients, weights) without and with offsets, and the offsets found."""

    weights: Array
    plain: Array
    shifted: Array
    offsets: tuple[float, float]


def cosine_example(truths: tuple[float, float] = (1.0, 2.0), p: float = 0.0, seed: int = 0) -> CosineExample:
    """Return the squared loss of cos(w·(x + p·x + q)) at two clients, over a grid of w."""
    generator = np.random.default_rng(seed)
    weights, shifts = np.linspace(0, 3, 151), np.linspace(-3, 3, 61)
    losses = []  # per client: (shifts, weights)
    for truth in truths:
        x = generator.normal(size=_SAMPLES)
        y = np.cos(truth * x) + generator.normal(scale=_NOISE, size=_SAMPLES)
        shifted = x + p * x + shifts[:, None]  # (shifts, samples)
        answers = np.cos(weights[None, :, None] * shifted[:, None, :])
        losses.append(((answers - y) ** 2).mean(axis=2))
    gaps = np.abs(losses[0][:, None] - losses[1][None]).mean(axis=2)
    first, second = np.unravel_index(int(gaps.argmin()), gaps.shape)
    none = int(np.abs(shifts).argmin())
    return CosineExample(
        weights,
        np.stack([losses[0][none], losses[1][none]]),
        np.stack([losses[0][first], losses[1][second]]),
        (float(shifts[first]), float(shifts[second])),
    )


@dataclass(frozen=True)
class LinearExample:
    """A federation's mean loss and weights (rounds, 2) after each round, and its final offsets."""

    losses: Array
    weights: Array
    offsets: Array


def linear_example(
    *, with_offsets: bool, noise_means: tuple[float, float], rounds: int = 60, steps: int = 5, seed: int = 0
) -> LinearExample:
    """Fit y = w·(x + q) + noise at two clients by local gradient steps; average the weights, not the offsets."""
    generator = np.random.default_rng(seed)
    truths, rate = np.array([[1.0, 2.0], [2.0, 1.0]]), 0.05
    inputs = generator.normal(size=(2, _SAMPLES, 2))
    noise = generator.normal(scale=_NOISE, size=(2, _SAMPLES)) + np.array(noise_means)[:, None]
    targets = np.einsum("cnd,cd->cn", inputs, truths) + noise
    weights, offsets = np.zeros(2), np.zeros((2, 2))
    if with_offsets:
        offsets = generator.normal(scale=0.1, size=(2, 2))
    losses, path = [], []
    for _ in range(rounds):
        local = np.tile(weights, (2, 1))
        for _ in range(steps):
            shifted = inputs + offsets[:, None]
            rest = np.einsum("cnd,cd->cn", shifted, local) - targets
            if with_offsets:
                offsets = offsets - rate * 2 * rest.mean(axis=1)[:, None] * local
                shifted = inputs + offsets[:, None]
                rest = np.einsum("cnd,cd->cn", shifted, local) - targets
            local = local - rate * 2 * np.einsum("cn,cnd->cd", rest, shifted) / _SAMPLES
        weights = local.mean(axis=0)
        rest = np.einsum("cnd,d->cn", inputs + offsets[:, None], weights) - targets
        losses.append(float((rest**2).mean()))
        path.append(weights)
    return LinearExample(np.array(losses), np.array(path), offsets)


def motivation_table() -> str:
    """Return both examples as tables."""
    cosine = cosine_example()
    lines = [
        "## cos(wx)\n",
        "| | without offsets | with offsets |\n|---|---|---|",
        f"| mean gap between the clients' losses over w | {_gap(cosine.plain):.4f} | {_gap(cosine.shifted):.4f} |",
        f"| smallest mean loss of both clients at one w | {cosine.plain.mean(axis=0).min():.4f} "
        f"| {cosine.shifted.mean(axis=0).min():.4f} |",
        f"\nThe offsets found are q = {cosine.offsets[0]:.1f} and {cosine.offsets[1]:.1f}.\n",
        "## wx\n",
        "| mean of the clients' noise | loss without offsets | with offsets |\n|---|---|---|",
    ]
    for means in ((0.0, 0.0), (1.0, -1.0)):
        plain, shifted = (linear_example(with_offsets=use, noise_means=means) for use in (False, True))
        lines.append(f"| {means[0]:g}, {means[1]:g} | {plain.losses[-1]:.4f} | {shifted.losses[-1]:.4f} |")
    return "\n".join([*lines, ""])


def _gap(losses: Array) -> float:
    return float(np.abs(losses[0] - losses[1]).mean())
