"""Speed of local training relative to a plain implementation of the same math, measured in one run."""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shared.contract.method_options import DistransOptions
from shared.contract.plan import BUILT_IN_BACKBONES, FederationPlan, validate_plan
from shared.learning.methods.distrans import OffsetStepper
from shared.learning.model import DoubleChannelModel, build_double
from shared.learning.offsets import initial_offset
from shared.learning.runtime import Runtime, select_device
from shared.tensors.arrays import as_tensor

STEP_KINDS = ("plain", "joint", "alternating")


@dataclass(frozen=True)
class TrainSpeed:
    """Seconds per step of each kind; the n-th steps of all kinds were measured together."""

    backbone: str
    batch: int
    seconds: dict[str, list[float]]

    @property
    def plain_images_per_second(self) -> float:
        """Speed of the plain implementation."""
        return self.batch / statistics.median(self.seconds["plain"])

    @property
    def joint_ratio(self) -> float:
        """Speed of the joint rule relative to the plain implementation; above 1 is faster."""
        return self._ratio("plain", "joint")

    @property
    def alternating_time_ratio(self) -> float:
        """Time of the alternating rule relative to the joint rule."""
        return self._ratio("alternating", "joint")

    def _ratio(self, above: str, below: str) -> float:
        # Of consecutive steps, because other load on the machine slows both alike.
        return statistics.median(a / b for a, b in zip(self.seconds[above], self.seconds[below], strict=True))


def measure(
    backbone: str, repeats: int, seconds: float, batch: int = 32, side: int = 64, device: str = "cpu"
) -> TrainSpeed:
    """Time steps of the three kinds in turn, for at least `repeats` steps of each and at least `seconds`."""
    plan = validate_plan(
        {
            "name": "bench",
            "preset": "paper",
            "classes": [str(label) for label in range(10)],
            "image": {"height": side, "width": side},
            "model": {"backbone": backbone},
        }
    )
    runtime = Runtime(torch.device(device))
    x = torch.randn(batch, *plan.image.shape).to(device)
    y = (torch.arange(batch) % 10).to(device)
    steps: dict[str, Callable[[Tensor, Tensor], object]] = {
        "plain": _plain_step(plan, runtime),
        "joint": _our_step(plan, "joint", runtime),
        "alternating": _our_step(plan, "alternating", runtime),
    }
    for step in [*steps.values()] * 2:  # warm-up
        step(x, y)
    times: dict[str, list[float]] = {kind: [] for kind in STEP_KINDS}
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn >= repeats and time.perf_counter() > end:
            break
        first = turn % len(STEP_KINDS)  # rotate, so that no kind always follows the same one
        for kind in STEP_KINDS[first:] + STEP_KINDS[:first]:
            _wait(runtime.device)
            started = time.perf_counter()
            steps[kind](x, y)
            _wait(runtime.device)
            times[kind].append(time.perf_counter() - started)
    return TrainSpeed(backbone, batch, times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _setup(plan: FederationPlan, runtime: Runtime) -> tuple[DoubleChannelModel, Tensor]:
    options = DistransOptions()
    net = runtime.prepare(build_double(plan, options.alpha)).train()
    return net, as_tensor(initial_offset(plan, options, "bench")).to(runtime.device).requires_grad_()


def _our_step(plan: FederationPlan, rule: str, runtime: Runtime) -> Callable[[Tensor, Tensor], object]:
    net, offset = _setup(plan, runtime)
    options = DistransOptions.model_validate({"update_rule": rule})
    return OffsetStepper(net, offset, plan, options, runtime).step


def _plain_step(plan: FederationPlan, runtime: Runtime) -> Callable[[Tensor, Tensor], object]:
    """Implement Eq. 1 in the obvious way: one forward pass per channel, then one backward pass."""
    net, offset = _setup(plan, runtime)
    model_optimizer = torch.optim.SGD(net.parameters(), lr=plan.training.lr)
    offset_optimizer = torch.optim.SGD([offset], lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        left = (1 - net.alpha) * x + net.alpha * offset
        right = (1 + net.alpha) * x - net.alpha * offset
        logits = net.logits(torch.cat([net.features(left), net.features(right)], dim=1))
        loss = F.cross_entropy(logits, y)
        model_optimizer.zero_grad()
        offset_optimizer.zero_grad()
        loss.backward()
        model_optimizer.step()
        offset_optimizer.step()

    return step


def run_bench(console: Console, backbones: list[str] | None, repeats: int, seconds: float, device: str) -> None:
    """Measure and print a table."""
    chosen = select_device(device)
    table = Table(title=f"Local training, 3×64×64, batch 32, on {chosen.type} with {torch.get_num_threads()} threads")
    for heading in ("backbone", "steps", "plain, images/s", "joint ÷ plain speed", "alternating ÷ joint time"):
        table.add_column(heading, justify="left" if heading == "backbone" else "right")
    with console.status("measuring") as status:
        for backbone in backbones or list(BUILT_IN_BACKBONES):
            status.update(f"measuring {backbone}")
            speed = measure(backbone, repeats, seconds, device=str(chosen))
            table.add_row(
                backbone,
                str(len(speed.seconds["plain"])),
                f"{speed.plain_images_per_second:.0f}",
                f"{speed.joint_ratio:.2f}×",
                f"{speed.alternating_time_ratio:.2f}×",
            )
    console.print(table)
