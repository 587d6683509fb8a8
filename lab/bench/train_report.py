"""What `bench train` measured: a table, a JSON file, a plot."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.bench.outputs import describe_machine
from shared import __version__
from shared.system.command_line import fold_cells

KINDS = ("written", "joint", "alternating")


@dataclass(frozen=True)
class TrainSpeed:
    """Seconds per pass of each kind over the same images; the n-th passes of all kinds were measured together."""

    backbone: str
    threads: int
    images: int
    seconds: dict[str, list[float]]

    def images_per_second(self, kind: str) -> float:
        """Median speed of a kind."""
        return self.images / statistics.median(self.seconds[kind])

    def ratio(self, kind: str) -> float:
        """Speed of a kind relative to the written-out loop; above 1 is faster."""
        # Of consecutive passes, because other load on the machine slows both alike.
        pairs = zip(self.seconds["written"], self.seconds[kind], strict=True)
        return statistics.median(written / ours for written, ours in pairs)


def print_results(console: Console, device: str, results: Sequence[TrainSpeed]) -> None:
    """Print a row per network."""
    table = Table(
        title=f"Local training on {device}, 3×64×64, batch 32",
        caption="Written: the authors' loop, one image at a time. Ratios: medians over passes that were measured "
        "together; above 1 is faster than written. Joint does the same math as written.",
    )
    headings = ("backbone", "threads", "passes", "written, images/s", "joint, images/s", "joint ÷ written")
    for heading in (*headings, "alternating ÷ written"):
        table.add_column(heading, justify="left" if heading == "backbone" else "right")
    for speed in results:
        table.add_row(
            speed.backbone,
            str(speed.threads),
            str(len(speed.seconds["written"])),
            f"{speed.images_per_second('written'):.0f}",
            f"{speed.images_per_second('joint'):.0f}",
            f"{speed.ratio('joint'):.2f}×",
            f"{speed.ratio('alternating'):.2f}×",
        )
    console.print(fold_cells(table))


def write_json(file: Path, device: str, results: Sequence[TrainSpeed]) -> None:
    """Write all measurements, with the machine they belong to."""
    networks = [asdict(speed) | {"ratios": {kind: speed.ratio(kind) for kind in KINDS[1:]}} for speed in results]
    content = {"distrans": __version__, "machine": describe_machine(), "device": device, "networks": networks}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_plot(file: Path, results: Sequence[TrainSpeed]) -> None:
    """Draw the speeds relative to the written-out loop, a group of bars per network; each pass is a dot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(KINDS[1:])
    for number, kind in enumerate(KINDS[1:]):
        places = [place + (number - 0.5) * width for place in range(len(results))]
        bars = axis.bar(places, [speed.ratio(kind) for speed in results], width, label=kind)
        axis.bar_label(bars, fmt="%.2f")
        for place, speed in zip(places, results, strict=True):
            pairs = zip(speed.seconds["written"], speed.seconds[kind], strict=True)
            ratios = [written / ours for written, ours in pairs]
            axis.plot([place] * len(ratios), ratios, ".", color="black", alpha=0.4)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(results)), [speed.backbone for speed in results])
    axis.set_ylabel("speed ÷ the written-out loop's")
    axis.legend()
    figure.savefig(file, dpi=120)
