"""How training shows itself: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.methods.base import BatchProgress

_LINE_EVERY_S = 10.0


class TrainingDisplay:
    """Shows one round's local training."""

    def __init__(self, round_number: int, console: Console, live: bool | None = None) -> None:
        self._round, self._console = round_number, console
        self._live = console.is_terminal if live is None else live
        self._started = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn(f"round {round_number}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=None, figures="")

    def __enter__(self) -> "TrainingDisplay":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, progress: BatchProgress) -> None:
        """Show how far it is."""
        now = time.monotonic()
        speed = progress.images / max(now - self._started, 1e-6)
        figures = f"loss {progress.loss:.4f}  accuracy {progress.accuracy:.1%}  {speed:.0f} images/s"
        self._bar.update(self._task, completed=progress.batch, total=progress.batches, figures=figures)
        if not self._live and (now - self._last_line >= _LINE_EVERY_S or progress.batch == progress.batches):
            self._last_line = now
            self._console.print(
                f"round {self._round}: batch {progress.batch} of {progress.batches}, {figures}", highlight=False
            )
            sys.stdout.flush()
