"""How fast local training is, against a plain implementation of the same mathematics, measured in one run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shared.method_options import DistransOptions
from shared.methods.distrans import OffsetStepper
from shared.model import DoubleChannelModel, build_double
from shared.offsets import initial_offset
from shared.plan import BUILT_IN_BACKBONES, FederationPlan, validate_plan
from shared.runtime import Runtime, select_device


@dataclass(frozen=True)
class TrainSpeed:
    """Images per second of one backbone."""

    backbone: str
    plain: float
    joint: float
    alternating: float

    @property
    def joint_ratio(self) -> float:
        """Speed of the joint rule over the plain implementation's; above 1 is faster."""
        return self.joint / self.plain

    @property
    def alternating_time_ratio(self) -> float:
        """Time of the alternating rule over the joint one's."""
        return self.joint / self.alternating


def measure(backbone: str, repeats: int, batch: int = 32, side: int = 64, device: str = "cpu") -> TrainSpeed:
    """Time steps of the three in turns, so that a busy machine slows all of them alike; medians."""
    plan = validate_plan(
        {
            "name": "bench",
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
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):  # two rounds to warm up
        for name, step in steps.items():
            _wait(runtime.device)
            started = time.perf_counter()
            step(x, y)
            _wait(runtime.device)
            if repeat >= 2:
                times[name].append(time.perf_counter() - started)
    speed = {name: batch / statistics.median(values) for name, values in times.items()}
    return TrainSpeed(backbone, speed["plain"], speed["joint"], speed["alternating"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _setup(plan: FederationPlan, runtime: Runtime) -> tuple[DoubleChannelModel, Tensor]:
    options = DistransOptions()
    net = runtime.prepare(build_double(plan, options.alpha)).train()
    return net, initial_offset(plan, options, "bench").to(runtime.device).requires_grad_()


def _our_step(plan: FederationPlan, rule: str, runtime: Runtime) -> Callable[[Tensor, Tensor], object]:
    net, offset = _setup(plan, runtime)
    options = DistransOptions.model_validate({"update_rule": rule})
    return OffsetStepper(net, offset, plan, options, runtime).step


def _plain_step(plan: FederationPlan, runtime: Runtime) -> Callable[[Tensor, Tensor], object]:
    """Eq. 1 and one backward pass, written down as a newcomer would: one pass through the network per channel."""
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


def run_bench(console: Console, backbones: list[str] | None, repeats: int, device: str) -> None:
    """Measure and print a table."""
    chosen = select_device(device)
    table = Table(title=f"Local training, 3×64×64, batch 32, on {chosen.type} with {torch.get_num_threads()} threads")
    for heading in ("backbone", "plain, images/s", "joint ÷ plain speed", "alternating ÷ joint time"):
        table.add_column(heading, justify="left" if heading == "backbone" else "right")
    with console.status("measuring") as status:
        for backbone in backbones or list(BUILT_IN_BACKBONES):
            status.update(f"measuring {backbone}")
            speed = measure(backbone, repeats, device=str(chosen))
            table.add_row(
                backbone, f"{speed.plain:.0f}", f"{speed.joint_ratio:.2f}×", f"{speed.alternating_time_ratio:.2f}×"
            )
    console.print(table)
