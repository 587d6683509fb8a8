"""CPU threads per Python thread, and how many of them training gains from."""

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shared.contract.plan import FederationPlan
from shared.learning.methods.training_loop import ModelStepper, plain_step
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.learning.seeds import seeded

logger = logging.getLogger(__name__)
_TURNS, _LONGEST_S = 3, 10.0
_GAIN = 0.95  # more threads must take less than this share of the time
_CHANGE = 1.5  # a round this many times slower or faster than the first one since the measurement calls for another
_QUOTA = Path("/sys/fs/cgroup/cpu.max")

# Thread counts → the seconds that a training step takes with each; empty if it was interrupted.
MeasureSteps = Callable[[Sequence[int]], dict[int, float]]


def limit_threads(count: int) -> None:
    """Limit torch in the calling thread, and only there, to this many CPU threads."""
    # A thread adopts the process-wide setting at its first torch operation, overwriting its own. Reading the setting
    # is such an operation: what is set afterward sticks.
    torch.get_num_threads()
    torch.set_num_threads(count)


def available_cores(quota: Path = _QUOTA) -> int:
    """Return how many cores this process may use: the machine's, its affinity's, or its control group's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit_us, period_us = map(int, quota.read_text().split())
    except (OSError, ValueError):  # not Linux, or no limit, which is "max"
        return cores
    return max(1, min(cores, limit_us // period_us))


def most_training_threads(*, serves: bool) -> int:
    """Return the most threads for training: every core, but one is left for predictions if the process serves."""
    return max(1, available_cores() - serves)


class TrainingThreads:
    """The number of threads that trains fastest, found by a measurement before the first round.

    More threads can be slower: a small network's threads wait for each other, and above all on a busy machine. Once a
    round's steps take much more or less time than before, the next round begins with another measurement.
    """

    def __init__(self, most: int, measure: MeasureSteps) -> None:
        self._counts = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
        self._measure, self._chosen = measure, most
        self._is_due = most > 1
        self._usual_s: float | None = None

    def choose(self) -> int:
        """Return the number of threads for the next round, measured if that is due."""
        if not self._is_due:
            return self._chosen
        try:
            seconds = self._measure(self._counts)
        except Exception as error:  # whatever the network cannot do, training reports it
            logger.debug("could not measure how many threads to train with", exc_info=error)
            seconds = {}
        if seconds:
            fastest = min(seconds.values())
            self._chosen = min(count for count, taken in seconds.items() if taken * _GAIN <= fastest)
            shown = ", ".join(f"{1000 * seconds[count]:.1f} ms with {count}" for count in sorted(seconds))
            logger.info("training with %d threads: a step takes %s", self._chosen, shown)
            self._is_due, self._usual_s = False, None
        return self._chosen

    def note_round(self, seconds: float, steps: int) -> None:
        """Compare a round's speed with the first one's since the measurement."""
        if len(self._counts) == 1 or not steps or self._is_due:
            return
        step_s = seconds / steps
        self._usual_s = self._usual_s or step_s
        self._is_due = not self._usual_s / _CHANGE <= step_s <= self._usual_s * _CHANGE


def time_steps(
    plan: FederationPlan, runtime: Runtime, should_stop: Callable[[], bool], counts: Sequence[int]
) -> dict[int, float]:
    """Return the median seconds of a plain step of the plan's network on the CPU, for each number of threads.

    The numbers take turns, so that other load on the machine slows all of them. Leaves the calling thread with the last
    one. Returns nothing if asked to stop.
    """
    net = runtime.prepare(build_single(plan)).train()
    step = plain_step(net, ModelStepper(net, plan, runtime), runtime)
    batch = plan.training.batch_size
    with seeded(plan.seed, "threads"):
        x = runtime.move(torch.randn(batch, *plan.image.shape))
    y = torch.arange(batch) % len(plan.classes)
    found: dict[int, list[float]] = {count: [] for count in counts}
    end = time.perf_counter() + _LONGEST_S
    for turn in range(_TURNS + 1):
        if turn > 1 and time.perf_counter() > end:
            break
        for count in counts:
            if should_stop():
                return {}
            limit_threads(count)
            started = time.perf_counter()
            step(x, y)
            found[count].append(time.perf_counter() - started)
    return {count: statistics.median(seconds[1:]) for count, seconds in found.items()}  # the first turn is the warm-up
