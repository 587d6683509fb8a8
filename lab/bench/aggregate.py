"""Speed of the coordinator's running mean relative to numpy's float64 sum, measured in one run.

The floor adds each float32 update to a float64 array, whose result depends on the order of the updates. The running
mean does not, and also checks that all values are finite. Both take the same updates in turns, so that other load on
the machine slows both alike; the report shows medians of the ratios between consecutive calls.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shared.tensors.mean import RunningMean

_TENSOR_BYTES = 4_000_000  # of each tensor of the model, like a convolution of a ResNet
_DISTINCT = 4  # updates in memory, used over and over
_SAMPLES = (100, 3000)  # range of the weights that stand for numbers of images
WEIGHTS = ("uniform", "samples")

Update = dict[str, Tensor]


@dataclass(frozen=True)
class MeanSpeed:
    """Seconds to add each update to the floor and to the mean, in pairs, and to compute the mean's result."""

    weights: str
    model_bytes: int
    floor_s: list[float]
    mean_s: list[float]
    result_s: float
    state_bytes: int

    @property
    def floor_bytes_per_s(self) -> float:
        """Median speed of numpy's sum."""
        return self.model_bytes / statistics.median(self.floor_s)

    @property
    def mean_bytes_per_s(self) -> float:
        """Median speed of the running mean."""
        return self.model_bytes / statistics.median(self.mean_s)

    @property
    def speed_ratio(self) -> float:
        """Median speed of the running mean relative to numpy's sum; above 1 is faster."""
        return statistics.median(a / b for a, b in zip(self.floor_s, self.mean_s, strict=True))

    @property
    def result_ratio(self) -> float:
        """Time of the result relative to one addition by numpy."""
        return self.result_s / statistics.median(self.floor_s)

    @property
    def memory_ratio(self) -> float:
        """Memory of the running mean relative to one model."""
        return self.state_bytes / self.model_bytes

    def summary(self) -> dict[str, object]:
        """Return the measurements and what follows from them, for JSON."""
        derived = ("floor_bytes_per_s", "mean_bytes_per_s", "speed_ratio", "result_ratio", "memory_ratio")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def measure(model_bytes: int, updates: int, weights: str = "uniform") -> MeanSpeed:
    """Time the addition of this many updates of a float32 model, after one that is not counted."""
    distinct = [_update(model_bytes // 4, seed) for seed in range(_DISTINCT)]
    chance = np.random.default_rng(0)
    mean = RunningMean()
    sums = {name: np.zeros(tensor.numel()) for name, tensor in distinct[0].items()}

    def add_floor(update: Update) -> None:
        for name, tensor in update.items():
            np.add(sums[name], tensor.numpy(), out=sums[name])

    floor_s: list[float] = []
    mean_s: list[float] = []
    for number, update in zip(range(updates + 1), itertools.cycle(distinct), strict=False):
        weight = int(chance.integers(*_SAMPLES)) if weights == "samples" else 1
        kinds = [(floor_s, partial(add_floor, update)), (mean_s, partial(mean.add, update, weight))]
        for seconds, add in kinds if number % 2 else kinds[::-1]:  # the kinds take turns going first
            seconds.append(_time(add))
    result_s = _time(mean.result)
    return MeanSpeed(weights, model_bytes, floor_s[1:], mean_s[1:], result_s, mean.size_bytes)


def _update(elements: int, seed: int) -> Update:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(elements, generator=generator).mul_(0.02)  # about as large as a ResNet's weights
    return {f"{number}.weight": part for number, part in enumerate(flat.split(_TENSOR_BYTES // 4))}


def _time(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def run_bench(console: Console, megabytes: int, updates: int, json_file: Path | None) -> None:
    """Measure, print a table, and write the measurements to a file if one is given."""
    table = Table(
        title=f"Running mean of {updates} float32 updates of {megabytes} MB, one thread",
        caption="Speed: median over pairs of calls. Result: its time ÷ one sum. Memory: of the sums ÷ one model.",
    )
    for heading in ("weights", "numpy's sum, GB/s", "mean, GB/s", "mean ÷ sum", "result ÷ sum", "memory ÷ model"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    found = []
    with console.status("measuring") as status:
        for weights in WEIGHTS:
            status.update(f"measuring {weights} weights")
            speed = measure(megabytes * 1_000_000, updates, weights)
            found.append(speed)
            table.add_row(
                weights,
                f"{speed.floor_bytes_per_s / 1e9:.2f}",
                f"{speed.mean_bytes_per_s / 1e9:.2f}",
                f"{speed.speed_ratio:.0%}",
                f"{speed.result_ratio:.1f}×",
                f"{speed.memory_ratio:.1f}×",
            )
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([speed.summary() for speed in found], indent=2) + "\n")
