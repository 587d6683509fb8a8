"""The cost of `/predict` over the bare network and, on request, beside LitServe, measured in one run.

The agent's web service runs in a process of its own, and so do the callers. The bare side decodes the same image and
runs the same network in this process. LitServe serves the same network, too. All of them compute with one thread, and
they take turns in short bursts, so that other load on the machine slows all of them alike.
"""

import base64
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.status import Status

from client_agent.settings import ServeOptions
from client_agent.threads import limit_threads
from lab.bench.litserve import REQUIREMENT, open_litserve
from lab.bench.outputs import check_outputs
from lab.bench.peer_venv import default_peers_folder, peer_programs
from lab.bench.predict_callers import Burst, BurstTimes, Callers, open_callers, request
from lab.bench.predict_network import Served, bench_image, bench_model, bench_plan, decode_image
from lab.bench.predict_report import LITSERVE, OURS, Load, NetworkResult, Side, print_result, write_json, write_plot
from lab.bench.usage import cpu_seconds
from lab.demo.processes import Processes
from shared.contract.errors import DistransError

_BURSTS = 5
_OPTIONS = ServeOptions()


@dataclass(frozen=True)
class PredictOptions:
    """What to measure, and where to keep it."""

    backbones: Sequence[str]
    callers: Sequence[int]
    calls: int  # of each side, per network and number of callers, unless that is less than two per caller and burst
    served: Sequence[Served] = ("offset", "blend")
    with_litserve: bool = False
    peers: Path | None = None
    json: Path | None = None
    plot: Path | None = None


def run_bench(console: Console, options: PredictOptions) -> None:
    """Measure all networks, print a table of each, and write the files."""
    check_outputs(options.json, options.plot)
    results: list[NetworkResult] = []
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distrans-bench-")))
        programs = None
        if options.with_litserve:
            status.update("installing LitServe")
            programs = peer_programs(options.peers or default_peers_folder(), "litserve", REQUIREMENT)
        callers = stack.enter_context(open_callers())
        for backbone in options.backbones:
            for served in options.served:
                tell = _Teller(status, f"{backbone}, {served}")
                tell("starting")
                network = _Network(backbone, served, folder / f"{backbone}-{served}", programs, callers)
                try:
                    results.append(network.measure(options, tell))
                except DistransError as error:
                    # The log it refers to is about to be removed; the message has its last lines.
                    raise DistransError(error.message, next_step="Try again, or with fewer callers.") from error
                print_result(console, results[-1])
                if options.json is not None:
                    write_json(options.json, results)
    if options.plot is not None:
        write_plot(options.plot, results)
        console.print(f"Plot: {options.plot}", soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class _Teller:
    """Shows what is being done for one network."""

    status: Status
    title: str

    def __call__(self, doing: str) -> None:
        self.status.update(f"{self.title}: {doing}")


@dataclass(frozen=True)
class _Server:
    """A server that is ready, and runs during its turns."""

    process_id: int
    port: int
    running: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class _Network:
    """One network, served by everything that is compared."""

    backbone: str
    served: Served
    folder: Path
    litserve: Path | None  # its programs
    callers: Callers

    def __post_init__(self) -> None:
        limit_threads(_OPTIONS.threads)
        self._plan, self._image = bench_plan(self.backbone), bench_image()
        self._model = bench_model(self._plan, self.served)
        body = {"images": [base64.b64encode(self._image).decode()]}
        self._request = request("/predict", json.dumps(body).encode())

    def measure(self, options: PredictOptions, tell: Callable[[str], None]) -> NetworkResult:
        """Start the servers, run all bursts, stop the servers."""
        result = NetworkResult(self.backbone, self.served)
        with ExitStack() as stack:
            processes = stack.enter_context(Processes(self.folder / "logs"))
            servers = self._start(processes, stack)
            for callers in options.callers:
                calls = max(2 * callers, options.calls // _BURSTS)  # with fewer, not all callers would be busy
                tell(f"{callers} callers, warming up")
                for server in servers.values():
                    self._call(server, callers, max(callers, calls // 2))
                self._run_bare(10)
                load = Load(callers, sides={name: Side() for name in servers})
                for number in range(_BURSTS):
                    tell(f"{callers} callers, burst {number + 1} of {_BURSTS}")
                    self._run_burst(load, servers, calls, first=number)
                    processes.pause(0)  # raises if one has ended
                result.loads.append(load)
        return result

    def _start(self, processes: Processes, stack: ExitStack) -> dict[str, _Server]:
        log = processes.start(OURS, "lab.bench.predict_service", [self.backbone, self.served])
        address = processes.wait_for(log, r"serving /predict on (\S+)")
        servers = {OURS: _Server(processes.process_id(OURS), int(address.rpartition(":")[2]))}
        if self.litserve is not None:
            limits = _OPTIONS.max_images, _OPTIONS.threads
            place = self.folder / "litserve"
            peer = open_litserve(processes, self.litserve, place, self.backbone, self.served, *limits)
            found = stack.enter_context(peer)
            servers[LITSERVE] = _Server(found.process_id, found.port, found.running)
        return servers

    def _run_burst(self, load: Load, servers: dict[str, _Server], calls: int, first: int) -> None:
        """Let each side have its turn; another one goes first each time."""

        def run_bare() -> None:
            seconds, cpu_s = self._run_bare(calls)
            load.bare_seconds.append(seconds)
            load.bare_cpu_s.append(cpu_s)

        def run(name: str) -> None:
            load.sides[name].add(*self._call(servers[name], load.callers, calls))

        turns: list[Callable[[], None]] = [run_bare, *(partial(run, name) for name in servers)]
        first %= len(turns)
        for turn in turns[first:] + turns[:first]:
            turn()

    def _run_bare(self, calls: int) -> tuple[float, float]:
        """Return the seconds and the processor time of as many calls in a plain loop."""
        started, before = time.perf_counter(), time.process_time()
        for _ in range(calls):
            probabilities = self._model.predict(decode_image(self._image, self._plan)[None])
            self._model.rank(probabilities, 3)
        return time.perf_counter() - started, time.process_time() - before

    def _call(self, server: _Server, callers: int, calls: int) -> tuple[BurstTimes, float | None]:
        """Return what a burst took, and the server's processor time."""
        with server.running():
            before = cpu_seconds(server.process_id)
            times = self.callers.run(Burst(server.port, self._request, callers, calls))
            after = cpu_seconds(server.process_id)
        return times, None if before is None or after is None else after - before
