"""A federation's round, without training, beside its floor and, on request, Flower; all measured in turn in one run.

Each size gets a new coordinator in an empty folder, and all of it is removed afterward. The first round of a federation
warms up connections and caches; it is reported but not summarized.
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.status import Status

from lab.bench.coordinator import MeasuredCoordinator
from lab.bench.floor import Floor, open_floor
from lab.bench.flower import REQUIREMENT, Flower, open_flower
from lab.bench.outputs import check_outputs
from lab.bench.peer_venv import default_peers_folder, peer_programs
from lab.bench.round_plan import array_sizes, plan_of_size, update_body
from lab.bench.round_report import RoundRow, SizeResult, print_result, write_json, write_plot
from lab.bench.storage import new_storage
from lab.bench.swarm import Swarm
from lab.bench.thin_client import ThinClient, UpdateBody
from lab.demo.processes import Processes
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan


@dataclass(frozen=True)
class RoundOptions:
    """The options of the command."""

    clients: Sequence[int]
    megabytes: Sequence[float]
    rounds: int = 3
    database: str | None = None
    blobs: str | None = None
    with_flower: bool = False
    peers: Path | None = None
    json: Path | None = None
    plot: Path | None = None


def run_bench(console: Console, options: RoundOptions) -> None:
    """Measure every combination of clients and megabytes; print a table of each as soon as it is complete."""
    check_outputs(options.json, options.plot)
    results: list[SizeResult] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distrans-bench-")))
        # Starts nothing itself: between two sizes, too, signals must end the run in order.
        stack.enter_context(Processes(folder / "none"))
        status = stack.enter_context(console.status("starting"))
        programs = None
        if options.with_flower:
            status.update(f"installing {REQUIREMENT}")
            programs = peer_programs(options.peers or default_peers_folder(), "flower", REQUIREMENT)
        for megabytes in options.megabytes:
            for clients in options.clients:
                tell = _Teller(status, f"{clients} × {megabytes:g} MB")
                tell("starting")
                plan = plan_of_size(megabytes, clients, options.rounds)
                place = folder / f"{clients}-{megabytes:g}"
                place.mkdir()
                size = _Size(plan, clients, place, options, programs)
                try:
                    results.append(size.measure(tell))
                except DistransError as error:
                    if str(folder) not in (error.next_step or ""):
                        raise
                    # The log it refers to is about to be removed; the message has its last lines.
                    raise DistransError(error.message, next_step="Try again, or with fewer clients.") from error
                print_result(console, results[-1])
                if options.json is not None:
                    write_json(options.json, results)
    if options.plot is not None:
        write_plot(options.plot, results)
        console.print(f"Plot: {options.plot}", soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class _Teller:
    """Shows what is being done for one size."""

    status: Status
    title: str

    def __call__(self, doing: str) -> None:
        self.status.update(f"{self.title}: {doing}")


@dataclass
class _Size:
    """One combination of clients and megabytes."""

    plan: FederationPlan
    clients: int
    folder: Path
    options: RoundOptions
    flower_programs: Path | None
    body: UpdateBody = field(init=False)

    def __post_init__(self) -> None:
        self.body = UpdateBody.of(update_body(self.plan))

    def measure(self, tell: Callable[[str], None]) -> SizeResult:
        """Start everything, run the rounds, stop everything."""
        size_bytes = len(self.body.data)
        with ExitStack() as stack:
            data = self.folder / "data"
            storage = stack.enter_context(new_storage(data, self.options.database, self.options.blobs))
            processes = stack.enter_context(Processes(self.folder / "logs"))
            coordinator = MeasuredCoordinator(processes, storage)
            stack.callback(coordinator.close)
            result = SizeResult(storage.title, self.clients, size_bytes, coordinator.peak_memory_bytes)
            tell("enrolling")
            tokens = coordinator.enroll(self.plan, [f"client-{number}" for number in range(self.clients)])

            def connect(token: str, stopping: threading.Event) -> ThinClient:
                return ThinClient(coordinator.url, token, self.body, stopping)

            swarm = stack.enter_context(Swarm(connect, tokens))
            floor = stack.enter_context(open_floor(self.clients, size_bytes, self.folder))
            flower = None
            if self.flower_programs is not None:
                tell("starting Flower")
                sizes, place = array_sizes(self.plan), self.folder / "flower"
                flower = stack.enter_context(open_flower(processes, self.flower_programs, place, self.clients, sizes))
            coordinator.start_federation(self.plan.name)
            swarm.await_ready(processes.pause)
            sides = _Sides(processes, coordinator, swarm, floor, flower)
            for number in range(1, self.options.rounds + 1):
                tell(f"round {number} of {self.options.rounds}")
                result.rounds.append(sides.run_round(number))
        return result


@dataclass(frozen=True)
class _Sides:
    """What is compared: all of it is running, and waits for its turn."""

    processes: Processes
    coordinator: MeasuredCoordinator
    swarm: Swarm
    floor: Floor
    flower: Flower | None

    def run_round(self, number: int) -> RoundRow:
        """Run a round of each side, one after the other; another side goes first each time."""
        row = RoundRow(number)
        turns = [self._run_ours, self._run_floor, self._run_flower]
        first = number % len(turns)
        for run in turns[first:] + turns[:first]:
            run(row)
        return row

    def _run_ours(self, row: RoundRow) -> None:
        coordinator = self.coordinator
        before = coordinator.cpu_s
        times = self.swarm.run_round(row.number, self.processes.pause)
        after = coordinator.cpu_s
        row.seconds, row.tail_s = times.seconds, times.tail_s
        row.cpu_s = None if before is None or after is None else after - before
        row.peak_memory_bytes, row.disk_bytes = coordinator.peak_memory_bytes, coordinator.storage.size_bytes()

    def _run_floor(self, row: RoundRow) -> None:
        row.floor_s = self.floor.run_round()

    def _run_flower(self, row: RoundRow) -> None:
        row.flower_s = None if self.flower is None else self.flower.run_round()
