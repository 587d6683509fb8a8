"""Child processes that end with the program that started them."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from shared.contract.errors import DistransError

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_S = 20.0


class Processes:
    """A group of programs, all stopped when the `with` block ends.

    Inside the block, SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does.
    """

    def __init__(self, log_folder: Path) -> None:
        self._logs = log_folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._one_ended = threading.Event()
        self._interruptible = True
        self._interrupted = False

    def __enter__(self) -> "Processes":
        self._logs.mkdir(parents=True, exist_ok=True)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _ENDING_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        if self._interruptible:
            raise KeyboardInterrupt

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Delay Ctrl-C until the end of the block, so that it cannot fall between starting and recording a process."""
        self._interruptible = False
        try:
            yield
        finally:
            self._interruptible = True
        if self._interrupted:
            raise KeyboardInterrupt

    def start(self, name: str, module: str, arguments: Sequence[str | Path], **environment: str) -> Path:
        """Start `python -m module`; return the path of its log."""
        safe = {"PYTHONSAFEPATH": "1"}  # a `shared` in the current folder is not ours
        return self.start_program(name, [sys.executable, "-m", module, *arguments], **safe | environment)

    def start_program(self, name: str, command: Sequence[str | Path], **environment: str) -> Path:
        """Start a program in its own session, out of reach of Ctrl-C; return the path of its log."""
        log = self._logs / f"{name}.log"
        # Settings of the user's own coordinator or agent, such as its database, must not reach the demo's.
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key == "DISTRANS_PLUGINS" or not key.startswith("DISTRANS_")
        }
        with self._uninterrupted(), log.open("wb") as handle:
            process = self._running[name] = subprocess.Popen(  # noqa: S603 - no shell
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env=inherited | environment,
                start_new_session=True,
            )
        threading.Thread(target=self._await_end, args=[process], name=name, daemon=True).start()
        return log

    def process_id(self, name: str) -> int:
        """Return the process id of a program that was started under this name."""
        return self._running[name].pid

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._one_ended.set()

    def pause(self, seconds: float) -> None:
        """Wait; raise as soon as one of the programs ends."""
        self._one_ended.wait(seconds)
        for name, process in self._running.items():
            if process.poll() is not None:
                log = self._logs / f"{name}.log"
                last = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise DistransError(
                    f"{name} ended with code {process.returncode}: {' / '.join(last)}", next_step=f"See {log}."
                )

    def wait_for(self, log: Path, pattern: str, timeout_s: float = 300) -> str:
        """Wait until the pattern appears in the log, and return its first group."""
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            if match := re.search(pattern, log.read_text(errors="replace")):
                return match[1]
            self.pause(0.05)
        raise DistransError(f"{log.stem} was not ready within {timeout_s:.0f} s.", next_step=f"See {log}.")

    def stop(self) -> None:
        """Terminate all programs, and kill those that do not end in time; Ctrl-C kills them at once."""
        self._interruptible, self._interrupted = False, False
        for process in self._running.values():
            process.terminate()
        give_up_at = time.monotonic() + _PATIENCE_S
        for process in self._running.values():
            while process.poll() is None:
                if self._interrupted or time.monotonic() > give_up_at:
                    process.kill()
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        self._running.clear()
