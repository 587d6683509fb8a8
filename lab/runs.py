"""`distrans-lab run`: an experiment's cells that are not done yet, with progress, to its results folder."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from lab.cells import Cell, Workspace
from lab.checkpoints import replace_text
from lab.datasets.files import DatasetMissing
from lab.datasets.registry import locate
from lab.engines import Engine, ProcessEngine, run_sequentially
from lab.experiment import Experiment, ExperimentError, Scale
from lab.results import Results
from shared.plan import ImagePlan
from shared.problems import DistransError
from shared.runtime import select_device

_SECONDS_BETWEEN_LINES = 30
_SECONDS_BETWEEN_TABLES = 5
_FILTERS = ("data", "shift", "method", "dh", "seed", "clients", "vary")


@dataclass(frozen=True)
class RunOptions:
    """How to run, beside what."""

    scale: Scale = "full"
    engine: str = "sequential"
    workers: int = 0  # 0: one a core
    out: Path | None = None
    data_root: Path = Path("data")
    device: str = "cpu"
    only: tuple[str, ...] = ()


def results_folder(experiment: Experiment, scale: Scale, out: Path | None = None) -> Path:
    """Where an experiment's results go unless told otherwise."""
    return out or Path("lab-results") / f"{experiment.name}-{scale}"


def run_experiment(console: Console, file: Path, experiment: Experiment, options: RunOptions) -> int:
    """Run what is missing; the number of cells that failed."""
    every_cell = experiment.cells(options.scale)
    cells = select(every_cell, options.only)
    if not (options.engine == "ray" and "RAY_ADDRESS" in os.environ):  # a cluster has devices that are not here
        select_device(options.device)
    results = Results(results_folder(experiment, options.scale, options.out))
    workers = options.workers or os.cpu_count() or 1
    with results.locked():
        replace_text(results.folder / "experiment.toml", file.read_text(encoding="utf-8"))
        if experiment.kind != "federations":
            return 0  # nothing is trained; the report computes it
        for broken in results.broken():
            _say_red(console, f"{broken} holds no result; its federation counts as not done.")
        left = [cell for cell in cells if not results.has(cell)]
        console.print(
            f"{experiment.title}: {len(cells)} federations at scale {options.scale}, "
            f"{len(cells) - len(left)} of them done before; results in {results.folder}",
            highlight=False,
            soft_wrap=True,
        )
        wanted = len(left)
        left = _with_data(left, options.data_root, results, console)
        board = Board(console, results, left, every_cell)
        workspace = Workspace(options.data_root, results.checkpoints, options.device)
        try:
            with board.progress:
                _engine(options.engine, workers, results.folder)(left, workspace, board)
        except KeyboardInterrupt:
            console.print(f"Interrupted with {board.finished} of {len(left)} done. Run it again to go on from there.")
            raise
        finally:
            results.write_tables(every_cell)
    for cell, reason in board.failed:
        _say_red(console, f"failed: {cell.title}: {reason}")
    return len(board.failed) + wanted - len(left)


def _with_data(cells: Sequence[Cell], root: Path, results: Results, console: Console) -> list[Cell]:
    """The cells whose set is there; of one that is not, it is said once where to get it."""
    kept: list[Cell] = []
    for name in dict.fromkeys(cell.data.name for cell in cells):
        of_set = [cell for cell in cells if cell.data.name == name]
        try:
            locate(name, ImagePlan.model_validate(of_set[0].plan["image"]), root)
        except DatasetMissing as error:
            for cell in of_set:
                results.store_failure(cell, str(error), "")
            _say_red(console, f"failed: {len(of_set)} federations on {name}: {error}")
            continue
        except (DistransError, OSError):
            pass  # what else is wrong with a set is the reason of its cells
        kept += of_set
    return kept


def _say_red(console: Console, words: str) -> None:
    console.print(words, style="red", markup=False, highlight=False, soft_wrap=True)


def select(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that meet all filters like `dh=0.8`; filters of one name are alternatives, and each must be there."""
    wanted: dict[str, set[str]] = {}
    for text in only:
        name, equals, value = text.partition("=")
        if not equals or name not in _FILTERS:
            raise ExperimentError(
                f"--only {text} is no filter.", next_step=f"Use NAME=VALUE with {', '.join(_FILTERS)}."
            )
        there = {_canonical(shown): shown for shown in (_shown(cell, name) for cell in cells)}
        if _canonical(value) not in there:
            raise ExperimentError(
                f"No federation of this experiment has {text}.",
                next_step=f"There is {name}={', '.join(there.values())}.",
            )
        wanted.setdefault(name, set()).add(_canonical(value))
    chosen = [
        cell for cell in cells if all(_canonical(_shown(cell, name)) in values for name, values in wanted.items())
    ]
    if wanted and not chosen:
        raise ExperimentError("No federation of this experiment meets the filters of --only.")
    return chosen


def _shown(cell: Cell, name: str) -> str:
    values = {"data": cell.data.name, "shift": cell.data.shift, "method": cell.label, "vary": cell.varied}
    return str(values[name] if name in values else getattr(cell, name))


def _canonical(value: str) -> str:
    """0.80, .8 and 80% are one DH."""
    try:
        return repr(float(value[:-1]) / 100 if value.endswith("%") else float(value))
    except ValueError:
        return value.casefold()


def _engine(name: str, workers: int, folder: Path) -> Engine:
    if name == "sequential":
        return run_sequentially
    if name == "processes":
        return ProcessEngine(workers, folder / "workers.log")
    if name == "ray":
        from lab.ray_engine import RayEngine

        return RayEngine(workers)
    raise DistransError(f"There is no engine {name!r}.", next_step="Use sequential, processes or ray.")


@dataclass
class Board:
    """Keeps results and shows how far everything is: bars on a terminal, else a line now and then."""

    console: Console
    results: Results
    cells: Sequence[Cell]
    tabled: Sequence[Cell]  # also those done before, or left out this time
    finished: int = 0
    failed: list[tuple[Cell, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._whole = self.progress.add_task("federations", total=len(self.cells), left="")
        self._bars: dict[str, TaskID] = {}
        self._rounds = Clock(sum(cell.rounds for cell in self.cells))
        self._said = self._written = time.monotonic()

    def on_round(self, cell: Cell, done: int) -> None:
        """Count, and say so now and then."""
        if cell.id not in self._bars:
            self._bars[cell.id] = self.progress.add_task(cell.title, total=cell.rounds, left="rounds")
        self.progress.update(self._bars[cell.id], completed=done)
        self._rounds.count(cell.id, done)
        self.progress.update(self._whole, left=self._rounds.left())
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._say(f"{cell.title}: round {done} of {cell.rounds}")

    def on_finished(self, cell: Cell, result: dict[str, Any]) -> None:
        """Store it."""
        self.results.store(cell, result)
        self.finished += 1
        self._end(
            cell, f"accuracy {result['last']['accuracy']:.4f}" if result["last"]["accuracy"] is not None else "done"
        )

    def on_failed(self, cell: Cell, reason: str, details: str) -> None:
        """Note it."""
        self.results.store_failure(cell, reason, details)
        self.failed.append((cell, reason))
        self._end(cell, f"failed: {reason}")

    def _end(self, cell: Cell, words: str) -> None:
        if (bar := self._bars.pop(cell.id, None)) is not None:
            self.progress.remove_task(bar)
        self.progress.advance(self._whole)
        self._rounds.count(cell.id, cell.rounds)
        self._say(f"[{self.finished + len(self.failed)} of {len(self.cells)}] {cell.title}: {words}")
        if time.monotonic() - self._written > _SECONDS_BETWEEN_TABLES:
            self.results.write_tables(self.tabled)
            self._written = time.monotonic()

    def _say(self, words: str) -> None:
        self._said = time.monotonic()
        self.console.print(f"{words}{self._rounds.left(', ')}", markup=False, highlight=False, soft_wrap=True)


class Clock:
    """How long the rest takes if rounds go on at the pace they have had since the start."""

    def __init__(self, rounds: int) -> None:
        self._total, self._started = rounds, time.monotonic()
        self._done: dict[str, int] = {}
        self._before: dict[str, int] = {}  # of earlier runs

    def count(self, cell: str, done: int) -> None:
        """A cell's rounds so far; what it starts with was done before."""
        self._before.setdefault(cell, done)
        self._done[cell] = done

    def left(self, prefix: str = "") -> str:
        """`about 12 min left`, or nothing while there is no pace yet."""
        now = sum(self._done.values()) - sum(self._before.values())
        todo = self._total - sum(self._done.values())
        if now <= 0 or todo <= 0:
            return ""
        seconds = (time.monotonic() - self._started) / now * todo
        for unit, size in (("h", 3600), ("min", 60)):
            if seconds >= 2 * size:
                return f"{prefix}about {seconds / size:.0f} {unit} left"
        return f"{prefix}about {seconds:.0f} s left"
