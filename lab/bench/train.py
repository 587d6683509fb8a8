"""Speed of local training relative to the loop that the authors' scripts write, measured in one run."""

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from client_agent.data.dataset import SiteData, open_data
from client_agent.threads import TrainingThreads, available_cores, limit_threads, time_steps
from lab.bench.outputs import check_outputs
from lab.bench.train_report import KINDS, TrainSpeed, print_results, write_json, write_plot
from lab.bench.written_loop import WrittenLoop
from shared.contract.errors import DistransError
from shared.contract.method_options import DistransOptions
from shared.contract.plan import BUILT_IN_BACKBONES, FederationPlan, validate_plan
from shared.learning.methods.base import RoundTask, TrainingContext
from shared.learning.methods.distrans import OffsetStepper
from shared.learning.methods.training_loop import LocalTraining
from shared.learning.model import build_double
from shared.learning.offsets import initial_offset
from shared.learning.runtime import Runtime, select_device
from shared.tensors.arrays import as_tensor

DEFAULT_BACKBONES = ("lenet", "resnet18")
_CLASSES = 10


@dataclass(frozen=True)
class TrainOptions:
    """What to measure, and where to write it."""

    backbones: tuple[str, ...] = DEFAULT_BACKBONES
    repeats: int = 3
    seconds: float = 20
    images: int = 256
    threads: int | None = None
    device: str = "auto"
    json_file: Path | None = None
    plot: Path | None = None


def make_plan(backbone: str, side: int = 64) -> FederationPlan:
    """Return the plan of one side of the comparison: the authors' settings."""
    return validate_plan(
        {
            "name": "bench",
            "preset": "paper",
            "classes": [str(label) for label in range(_CLASSES)],
            "image": {"height": side, "width": side},
            "model": {"backbone": backbone, "initialization": "torch"},
        }
    )


def write_images(folder: Path, images: int, side: int = 64) -> None:
    """Write JPEG files in the form that sites have them: `train/CLASS/…` and one held-out image per class."""
    generator = np.random.default_rng(0)
    for number in range(images + _CLASSES):
        part, label = "train" if number < images else "test", number % _CLASSES
        coarse = Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        file = folder / part / str(label) / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, quality=90)


def measure(
    backbone: str, folder: Path, options: TrainOptions, on_pass: Callable[[int], None] = lambda _: None
) -> TrainSpeed:
    """Time passes over the images in turn, at least `repeats` of each kind and for at least `seconds`."""
    plan, runtime = make_plan(backbone), Runtime(torch.device(options.device))
    threads = _threads(plan, runtime, options.threads)
    limit_threads(threads)
    data = open_data(str(folder), plan, pin=runtime.device.type == "cuda")
    written = WrittenLoop(plan, folder / "train", runtime.device)
    passes: dict[str, Callable[[], object]] = {
        "written": written.run,
        "joint": _our_pass(plan, "joint", data, runtime),
        "alternating": _our_pass(plan, "alternating", data, runtime),
    }
    for one in passes.values():  # warm-up; ours decodes the images
        one()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    end = time.perf_counter() + options.seconds
    for turn in itertools.count():
        if turn >= options.repeats and time.perf_counter() > end:
            break
        on_pass(turn + 1)
        first = turn % len(KINDS)  # rotate, so that no kind always follows the same one
        for kind in KINDS[first:] + KINDS[:first]:
            started = time.perf_counter()
            passes[kind]()  # ends with reading the loss, for which the device has to finish
            times[kind].append(time.perf_counter() - started)
    return TrainSpeed(backbone, threads, data.train.samples, times)


def _threads(plan: FederationPlan, runtime: Runtime, wanted: int | None) -> int:
    """Return the number of threads for all kinds: what an agent that does not serve would choose."""
    if wanted is not None or runtime.device.type != "cpu":
        return wanted or available_cores()
    return TrainingThreads(available_cores(), partial(time_steps, plan, runtime, lambda: False)).choose()


def _our_pass(plan: FederationPlan, rule: str, data: SiteData, runtime: Runtime) -> Callable[[], object]:
    options = DistransOptions.model_validate({"update_rule": rule})
    net = runtime.prepare(build_double(plan, options.alpha)).train()
    offset = as_tensor(initial_offset(plan, options, "bench")).to(runtime.device).requires_grad_()
    stepper = OffsetStepper(net, offset, plan, options, runtime)
    context = TrainingContext(data.train, runtime, on_batch=lambda _: None)
    numbers = itertools.count()

    def train() -> object:
        return LocalTraining(plan, RoundTask("bench", next(numbers), {}, {}), context).run(net, stepper.step)

    return train


def run_bench(console: Console, options: TrainOptions) -> None:
    """Measure and print a table; write the measurements to a file and draw them if asked to."""
    check_outputs(options.json_file, options.plot)
    for backbone in options.backbones:
        if backbone not in BUILT_IN_BACKBONES:
            raise DistransError(
                f"There is no written-out loop for {backbone!r}.",
                next_step=f"Choose from {', '.join(BUILT_IN_BACKBONES)}.",
            )
    device = str(select_device(options.device))
    found: list[TrainSpeed] = []
    before = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder, console.status("writing images") as status:
            write_images(Path(folder), options.images)
            for backbone in options.backbones:
                status.update(f"measuring {backbone}: preparing")

                def show(number: int, backbone: str = backbone) -> None:
                    status.update(f"measuring {backbone}: turn {number}")

                found.append(measure(backbone, Path(folder), replace(options, device=device), show))
    finally:
        limit_threads(before)
        if found:  # also after Ctrl-C: what was measured so far
            print_results(console, device, found)
            if options.json_file is not None:
                write_json(options.json_file, device, found)
            if options.plot is not None:
                write_plot(options.plot, found)
