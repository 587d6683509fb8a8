"""`distrans-lab run`: run an experiment's unfinished cells and store the results."""

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from lab.datasets.files import DatasetMissing
from lab.datasets.registry import locate
from lab.experiments import EngineName, Scale
from lab.experiments.cells import Cell, CellObserver, Engine, Workspace, attempt, notify
from lab.experiments.experiment import Experiment, ExperimentError
from lab.experiments.results import Results
from shared.contract.errors import DistransError
from shared.learning.runtime import select_device
from shared.system.files import write_durably

_SECONDS_BETWEEN_LINES = 30
_SECONDS_BETWEEN_TABLES = 5
_FILTERS = ("data", "shift", "method", "dh", "seed", "clients", "vary")


@dataclass(frozen=True)
class ExperimentOptions:
    """How to run an experiment."""

    scale: Scale = "full"
    engine: EngineName = "sequential"
    workers: int = 0  # 0: one per core
    out: Path | None = None
    data_root: Path = Path("data")
    device: str = "cpu"
    only: tuple[str, ...] = ()


def results_folder(experiment: Experiment, scale: Scale, out: Path | None = None) -> Path:
    """Return the folder of an experiment's results: `out`, or the default one."""
    return out or Path("lab-results") / f"{experiment.name}-{scale}"


def run_experiment(console: Console, file: Path, experiment: Experiment, options: ExperimentOptions) -> int:
    """Run the unfinished cells and return the number of failed ones."""
    every_cell = experiment.cells(options.scale)
    cells = select(every_cell, options.only)
    if not (options.engine == "ray" and "RAY_ADDRESS" in os.environ):  # a cluster may have other devices
        select_device(options.device)
    results = Results(results_folder(experiment, options.scale, options.out))
    workers = options.workers or os.cpu_count() or 1
    with results.locked():
        write_durably(results.folder / "experiment.toml", file.read_bytes(), mode=0o644)
        if experiment.kind != "federations":
            return 0  # nothing to train; the report computes it
        for broken in results.broken():
            _print_error(console, f"{broken} is not a result; its federation will run again.")
        left = [cell for cell in cells if not results.has(cell)]
        console.print(
            f"{experiment.title}: {len(cells)} federations at scale {options.scale}, "
            f"{len(cells) - len(left)} already finished; results in {results.folder}",
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
            console.print(f"Interrupted: {board.finished} of {len(left)} finished. Run the command again to resume.")
            raise
        finally:
            results.write_tables(every_cell)
    for cell, reason in board.failed:
        _print_error(console, f"failed: {cell.title}: {reason}")
    return len(board.failed) + wanted - len(left)


def _with_data(cells: Sequence[Cell], root: Path, results: Results, console: Console) -> list[Cell]:
    """Return the cells whose data set exists; report each missing data set once."""
    kept: list[Cell] = []
    for name in dict.fromkeys(cell.data.name for cell in cells):
        of_set = [cell for cell in cells if cell.data.name == name]
        try:
            locate(name, of_set[0].image, root)
        except DatasetMissing as error:
            for cell in of_set:
                results.store_failure(cell, str(error), "")
            _print_error(console, f"failed: {len(of_set)} federations on {name}: {error}")
            continue
        except (DistransError, OSError):
            pass  # other errors of a data set are reported by its cells
        kept += of_set
    return kept


def _print_error(console: Console, message: str) -> None:
    console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def select(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells that match all filters, such as `dh=0.8`. Filters with the same name are alternatives."""
    wanted: dict[str, set[str]] = {}
    for text in only:
        name, equals, value = text.partition("=")
        if not equals or name not in _FILTERS:
            raise ExperimentError(
                f"--only {text} is not a filter.", next_step=f"Use NAME=VALUE, where NAME is {', '.join(_FILTERS)}."
            )
        there = {_canonical(shown): shown for shown in (_shown(cell, name) for cell in cells)}
        if _canonical(value) not in there:
            raise ExperimentError(
                f"No federation of this experiment has {text}.",
                next_step=f"Use {name}= with {', '.join(there.values())}.",
            )
        wanted.setdefault(name, set()).add(_canonical(value))
    chosen = [
        cell for cell in cells if all(_canonical(_shown(cell, name)) in values for name, values in wanted.items())
    ]
    if wanted and not chosen:
        raise ExperimentError("No federation of this experiment matches all --only filters.")
    return chosen


def _shown(cell: Cell, name: str) -> str:
    values = {"data": cell.data.name, "shift": cell.data.shift, "method": cell.label, "vary": cell.varied}
    return str(values[name] if name in values else getattr(cell, name))


def _canonical(value: str) -> str:
    """Return one spelling for equal values: 0.80, .8 and 80%."""
    try:
        return repr(float(value[:-1]) / 100 if value.endswith("%") else float(value))
    except ValueError:
        return value.casefold()


def _engine(name: EngineName, workers: int, folder: Path) -> Engine:
    if name == "processes":
        from lab.experiments.process_engine import ProcessEngine

        return ProcessEngine(workers, folder / "workers.log")
    if name == "ray":
        from lab.experiments.ray_engine import RayEngine

        return RayEngine(workers)
    return _run_sequentially


def _run_sequentially(cells: Sequence[Cell], workspace: Workspace, observer: CellObserver) -> None:
    """Run one cell after another in this process."""
    for cell in cells:
        notify(observer, cell, attempt(cell, workspace, functools.partial(observer.on_round, cell)))


@dataclass
class Board:
    """Stores results as cells finish, and shows progress: bars on a terminal, otherwise occasional lines."""

    console: Console
    results: Results
    cells: Sequence[Cell]
    tabled: Sequence[Cell]  # includes cells finished earlier or excluded from this run
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
        self._clock = TimeLeft(sum(cell.rounds for cell in self.cells))
        self._said = self._written = time.monotonic()

    def on_round(self, cell: Cell, done: int) -> None:
        """Update the bars; print a line now and then."""
        if cell.id not in self._bars:
            self._bars[cell.id] = self.progress.add_task(cell.title, total=cell.rounds, left="rounds")
        self.progress.update(self._bars[cell.id], completed=done)
        self._clock.count(cell.id, done)
        self.progress.update(self._whole, left=self._clock.left())
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._say(f"{cell.title}: round {done} of {cell.rounds}")

    def on_finished(self, cell: Cell, result: dict[str, Any]) -> None:
        """Store the result."""
        self.results.store(cell, result)
        self.finished += 1
        self._end(
            cell, f"accuracy {result['last']['accuracy']:.4f}" if result["last"]["accuracy"] is not None else "done"
        )

    def on_failed(self, cell: Cell, reason: str, details: str) -> None:
        """Store the reason."""
        self.results.store_failure(cell, reason, details)
        self.failed.append((cell, reason))
        self._end(cell, f"failed: {reason}")

    def _end(self, cell: Cell, message: str) -> None:
        if (bar := self._bars.pop(cell.id, None)) is not None:
            self.progress.remove_task(bar)
        self.progress.advance(self._whole)
        self._clock.count(cell.id, cell.rounds)
        self._say(f"[{self.finished + len(self.failed)} of {len(self.cells)}] {cell.title}: {message}")
        if time.monotonic() - self._written > _SECONDS_BETWEEN_TABLES:
            self.results.write_tables(self.tabled)
            self._written = time.monotonic()

    def _say(self, message: str) -> None:
        self._said = time.monotonic()
        self.console.print(f"{message}{self._clock.left(', ')}", markup=False, highlight=False, soft_wrap=True)


class TimeLeft:
    """Estimates the time left from the pace of rounds since the start."""

    def __init__(self, rounds: int) -> None:
        self._total, self._started = rounds, time.monotonic()
        self._done: dict[str, int] = {}
        self._before: dict[str, int] = {}  # finished by earlier runs

    def count(self, cell: str, done: int) -> None:
        """Record a cell's finished rounds; the first call for a cell counts those of earlier runs."""
        self._before.setdefault(cell, done)
        self._done[cell] = done

    def left(self, prefix: str = "") -> str:
        """Return `about 12 min left`, or nothing while the pace is unknown."""
        now = sum(self._done.values()) - sum(self._before.values())
        todo = self._total - sum(self._done.values())
        if now <= 0 or todo <= 0:
            return ""
        seconds = (time.monotonic() - self._started) / now * todo
        for unit, size in (("h", 3600), ("min", 60)):
            if seconds >= 2 * size:
                return f"{prefix}about {seconds / size:.0f} {unit} left"
        return f"{prefix}about {seconds:.0f} s left"
