"""How a cost grows with the size of a problem: fitted exponents, and plots of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def fitted_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """Return k of the power law cost ∝ sizeᵏ that fits best; None if all sizes are the same."""
    if len(set(sizes)) < 2:
        return None
    slope, _ = np.polyfit(np.log(sizes), np.log(costs), 1)
    return float(slope)


def plot_scaling(
    file: Path, sizes: Sequence[float], sides: Mapping[str, Sequence[float]], size_title: str, cost_title: str
) -> None:
    """Plot costs over sizes on logarithmic axes, with one line and one fitted exponent per side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    order = np.argsort(sizes)
    for name, costs in sides.items():
        exponent = fitted_exponent(sizes, costs)
        label = name if exponent is None else f"{name}: exponent {exponent:.2f}"
        axis.plot(np.array(sizes)[order], np.array(costs)[order], "o-", label=label)
    axis.set(xscale="log", yscale="log", xlabel=size_title, ylabel=cost_title)
    axis.legend()
    figure.savefig(file, dpi=120)
