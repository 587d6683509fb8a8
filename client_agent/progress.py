"""Training progress: a bar on a terminal, an occasional line elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.learning.methods.base import BatchProgress

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.1  # reading the figures of a batch makes the training wait for the device


class TrainingDisplay:
    """The progress of one round's local training."""

    def __init__(self, round_number: int, console: Console) -> None:
        self._round, self._console = round_number, console
        self._started = self._last_line = time.monotonic()
        self._last_bar = -_BAR_EVERY_S
        self._bar = Progress(
            TextColumn(f"round {round_number}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
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
        """Show the progress after a batch, unless the last one was shown just before."""
        now, is_last = time.monotonic(), progress.batch == progress.batches
        since, every_s = (
            (self._last_bar, _BAR_EVERY_S) if self._console.is_terminal else (self._last_line, _LINE_EVERY_S)
        )
        if now - since < every_s and not is_last:
            return
        speed = progress.images / max(now - self._started, 1e-6)
        figures = f"loss {progress.loss:.4f}  accuracy {progress.accuracy:.1%}  {speed:.0f} images/s"
        if self._console.is_terminal:
            self._last_bar = now
            self._bar.update(self._task, completed=progress.batch, total=progress.batches, figures=figures)
        else:
            self._last_line = now
            self._console.print(
                f"round {self._round}: batch {progress.batch} of {progress.batches}, {figures}", highlight=False
            )
            sys.stdout.flush()
