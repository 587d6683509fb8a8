"""What `bench round` measured: a table per size, a JSON file, a plot of all sizes."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.bench.outputs import describe_machine
from lab.bench.scaling import plot_scaling
from shared import __version__
from shared.system.command_line import fold_cells

_MB = 1_000_000


@dataclass
class RoundRow:
    """One round: ours, and what was measured in turn with it. The first one is the warm-up."""

    number: int
    seconds: float = 0.0
    tail_s: float = 0.0  # from the last acknowledged upload to the announcement of the new model
    cpu_s: float | None = None  # of the coordinator
    peak_memory_bytes: int | None = None  # of the coordinator, since its start
    disk_bytes: int | None = None  # kept after the round
    floor_s: float = 0.0
    flower_s: float | None = None

    @property
    def is_warm_up(self) -> bool:
        """Whether connections and caches were new."""
        return self.number == 1


@dataclass
class SizeResult:
    """All rounds of one number of clients and one size of updates."""

    storage: str
    clients: int
    update_bytes: int
    idle_memory_bytes: int | None
    rounds: list[RoundRow] = field(default_factory=list)

    @property
    def measured(self) -> list[RoundRow]:
        """The rounds after the warm-up, or the warm-up if it was the only round."""
        return self.rounds[1:] or self.rounds

    @property
    def seconds(self) -> float:
        """Median of the seconds of a round."""
        return statistics.median(row.seconds for row in self.measured)

    @property
    def floor_s(self) -> float:
        """Median of the floor's seconds."""
        return statistics.median(row.floor_s for row in self.measured)

    @property
    def flower_s(self) -> float | None:
        """Median of Flower's seconds; None if it was not measured."""
        found = [row.flower_s for row in self.measured if row.flower_s is not None]
        return statistics.median(found) if found else None

    @property
    def floor_ratio(self) -> float:
        """Median of seconds ÷ floor; each round is compared with the floor measured beside it."""
        return statistics.median(row.seconds / row.floor_s for row in self.measured)

    @property
    def flower_ratio(self) -> float | None:
        """Median of Flower's seconds ÷ ours."""
        found = [row.flower_s / row.seconds for row in self.measured if row.flower_s is not None]
        return statistics.median(found) if found else None


def print_result(console: Console, result: SizeResult) -> None:
    """Print the rounds of one size, and their medians."""
    table = Table(
        title=f"{result.clients} clients × {result.update_bytes / _MB:.2f} MB, {result.storage}",
        caption="Seconds and MB. * warm-up. Tail: from the last acknowledged upload to the new model. Memory: the "
        f"coordinator's peak so far, {_megabytes(result.idle_memory_bytes)} when idle.",
    )
    with_flower = result.flower_s is not None
    headings = ["round", "time", "tail", "CPU", "memory", "disk", "floor", "÷ floor"]
    for heading in [*headings, *(["Flower", "Flower ÷ time"] if with_flower else [])]:
        table.add_column(heading, justify="left" if heading == "round" else "right")
    for row in result.rounds:
        flower = [_seconds(row.flower_s), f"{row.flower_s / row.seconds:.1f}"] if row.flower_s is not None else []
        table.add_row(
            f"{row.number}*" if row.is_warm_up else str(row.number),
            _seconds(row.seconds),
            _seconds(row.tail_s),
            _seconds(row.cpu_s),
            _megabytes(row.peak_memory_bytes),
            _megabytes(row.disk_bytes),
            _seconds(row.floor_s),
            f"{row.seconds / row.floor_s:.1f}",
            *flower,
        )
    table.add_section()
    flower = [] if result.flower_ratio is None else [_seconds(result.flower_s), f"{result.flower_ratio:.1f}"]
    cells = ["median", _seconds(result.seconds), "", "", "", "", _seconds(result.floor_s), f"{result.floor_ratio:.1f}"]
    table.add_row(*cells, *flower)
    console.print(fold_cells(table))


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _megabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / _MB:.0f}"


def write_json(file: Path, results: Sequence[SizeResult]) -> None:
    """Write all measurements, with the machine they belong to."""
    sizes = [
        asdict(result) | {"median_floor_ratio": result.floor_ratio, "median_flower_ratio": result.flower_ratio}
        for result in results
    ]
    content = {
        "distrans": __version__,
        "machine": describe_machine(),
        "sizes": sizes,
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plot(file: Path, results: Sequence[SizeResult]) -> None:
    """Plot the seconds of a round over clients × bytes; a line per side, with its fitted exponent."""
    volumes = [result.clients * result.update_bytes / _MB for result in results]
    sides = {"DisTrans": [result.seconds for result in results], "floor": [result.floor_s for result in results]}
    flower = [result.flower_s for result in results if result.flower_s is not None]
    if len(flower) == len(results):
        sides["Flower"] = flower
    plot_scaling(file, volumes, sides, "clients × update, MB", "seconds per round")
