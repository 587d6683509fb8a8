"""What `bench predict` measured: a table per network, a JSON file, a plot."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.bench.predict_callers import BurstTimes
from shared import __version__
from shared.system.command_line import fold_cells


@dataclass
class Side:
    """All bursts of one server, with the same number of callers."""

    burst_seconds: list[float] = field(default_factory=list)
    burst_cpu_s: list[float] = field(default_factory=list)  # of the server; empty where the system does not tell
    latencies_s: list[float] = field(default_factory=list)

    def add(self, times: BurstTimes, cpu_s: float | None) -> None:
        """Add a burst."""
        self.burst_seconds.append(times.seconds)
        self.latencies_s += times.latencies_s
        if cpu_s is not None:
            self.burst_cpu_s.append(cpu_s)

    @property
    def calls_per_s(self) -> float:
        """Throughput over all bursts."""
        return len(self.latencies_s) / sum(self.burst_seconds)

    @property
    def median_s(self) -> float:
        """Median latency."""
        return statistics.median(self.latencies_s)

    @property
    def p99_s(self) -> float:
        """99th percentile of the latencies."""
        return statistics.quantiles(self.latencies_s, n=100)[98]

    @property
    def cpu_s_per_call(self) -> float | None:
        """Processor time per call."""
        return sum(self.burst_cpu_s) / len(self.latencies_s) if self.burst_cpu_s else None

    def as_json(self) -> dict[str, object]:
        """Return the figures without the single latencies."""
        figures = {
            "calls": len(self.latencies_s),
            "calls_per_s": self.calls_per_s,
            "median_s": self.median_s,
            "p99_s": self.p99_s,
            "cpu_s_per_call": self.cpu_s_per_call,
        }
        return asdict(self) | figures | {"latencies_s": None}


@dataclass
class Load:
    """What a number of callers measured, in bursts that took turns."""

    callers: int
    bare_seconds: list[float] = field(default_factory=list)  # per burst: as many calls in a bare loop
    bare_cpu_s: list[float] = field(default_factory=list)
    sides: dict[str, Side] = field(default_factory=dict)

    def bare_ratio(self, name: str) -> float:
        """Median ratio of a server's calls per second to the bare loop's, burst by burst."""
        pairs = zip(self.bare_seconds, self.sides[name].burst_seconds, strict=True)
        return statistics.median(bare / served for bare, served in pairs)


OURS, LITSERVE = "agent", "LitServe"


@dataclass
class NetworkResult:
    """All loads of one network."""

    backbone: str
    served: str
    loads: list[Load] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Ours over LitServe's: more than 1 is better for the throughput, less than 1 for the times."""

    throughput: float
    median: float
    p99: float
    cpu: float | None

    @classmethod
    def of(cls, load: Load) -> "Comparison | None":
        """Return None if LitServe was not measured; throughput and CPU are compared burst by burst."""
        if LITSERVE not in load.sides:
            return None
        ours, peer = load.sides[OURS], load.sides[LITSERVE]
        cpu = [a / b for a, b in zip(ours.burst_cpu_s, peer.burst_cpu_s, strict=True) if b]
        return cls(
            statistics.median(b / a for a, b in zip(ours.burst_seconds, peer.burst_seconds, strict=True)),
            ours.median_s / peer.median_s,
            ours.p99_s / peer.p99_s,
            statistics.median(cpu) if cpu else None,
        )


def print_result(console: Console, result: NetworkResult) -> None:
    """Print the loads of one network."""
    table = Table(
        title=f"{result.backbone}, {result.served}: one image of 64×64 per request",
        caption="Bare: a loop that decodes the image and runs the network. CPU: of the server, per call.",
    )
    for heading in ("callers", "server", "calls/s", "÷ bare", "median", "p99", "CPU"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for load in result.loads:
        calls = len(load.sides[OURS].latencies_s)
        bare = sum(load.bare_seconds) / calls
        table.add_row(
            str(load.callers), "bare", f"{1 / bare:.0f}", "", _ms(bare), "", _ms(sum(load.bare_cpu_s) / calls)
        )
        for name, side in load.sides.items():
            cells = [f"{side.calls_per_s:.0f}", f"{load.bare_ratio(name):.2f}"]
            times = [_ms(side.median_s), _ms(side.p99_s), _ms(side.cpu_s_per_call)]
            table.add_row("", name, *cells, *times)
        if found := Comparison.of(load):
            cpu = "–" if found.cpu is None else f"{found.cpu:.2f}"
            ratios = [f"{found.throughput:.2f}", "", f"{found.median:.2f}", f"{found.p99:.2f}", cpu]
            table.add_row("", "agent ÷ LitServe", *ratios, style="bold")
        table.add_section()
    console.print(fold_cells(table))


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.2f} ms"


def write_json(file: Path, results: Sequence[NetworkResult]) -> None:
    """Write all measurements except single latencies, with the machine they belong to."""
    content = {
        "distrans": __version__,
        "machine": {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
        "networks": [_network_json(result) for result in results],
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _network_json(result: NetworkResult) -> dict[str, object]:
    loads = []
    for load in result.loads:
        found = Comparison.of(load)
        loads.append(
            {
                "callers": load.callers,
                "bare_seconds": load.bare_seconds,
                "bare_cpu_s": load.bare_cpu_s,
                "sides": {
                    name: side.as_json() | {"bare_ratio": load.bare_ratio(name)} for name, side in load.sides.items()
                },
                "agent_over_litserve": None if found is None else asdict(found),
            }
        )
    return {"backbone": result.backbone, "served": result.served, "loads": loads}


def write_plot(file: Path, results: Sequence[NetworkResult]) -> None:
    """Plot throughput and 99th percentile over callers, one row per network."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 * len(results)), layout="constrained")
    rows = figure.subplots(len(results), 2, squeeze=False)
    for (left, right), result in zip(rows, results, strict=True):
        callers = [load.callers for load in result.loads]
        for name in result.loads[0].sides:
            sides = [load.sides[name] for load in result.loads]
            left.plot(callers, [side.calls_per_s for side in sides], "o-", label=name)
            right.plot(callers, [1000 * side.p99_s for side in sides], "o-", label=name)
        bare = [len(load.sides[OURS].latencies_s) / sum(load.bare_seconds) for load in result.loads]
        left.plot(callers, bare, "--", color="gray", label="bare loop")
        left.set(
            title=f"{result.backbone}, {result.served}", xlabel="callers", ylabel="calls per second", ylim=(0, None)
        )
        right.set(title="99th percentile", xlabel="callers", ylabel="ms", ylim=(0, None))
        left.legend()
    figure.savefig(file, dpi=120)
