"""Child processes that never outlive the one that started them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from shared.problems import DistransError

_PROGRAMS = {"server": "server", "agent": "client_agent"}


class Processes:
    """A group of programs of this project; leaving the block stops all of them."""

    def __init__(self, log_folder: Path) -> None:
        self._logs = log_folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, program: str, arguments: Sequence[str | Path], **environment: str) -> Path:
        """Start a program; the path of its log. It gets its own session: Ctrl-C reaches it through `stop` alone."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as handle:
            self._running[name] = subprocess.Popen(  # noqa: S603 - the project's own programs
                [sys.executable, "-m", _PROGRAMS[program], *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
        return log

    def check(self) -> None:
        """Raise when one of them has ended before its time."""
        for name, process in self._running.items():
            if process.poll() is not None:
                log = self._logs / f"{name}.log"
                last = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise DistransError(
                    f"{name} has ended with code {process.returncode}: {' / '.join(last)}", next_step=f"See {log}."
                )

    def wait_for(self, log: Path, pattern: str, timeout_s: float = 120) -> str:
        """The first group of the first line in a log that matches."""
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            if match := re.search(pattern, log.read_text(errors="replace")):
                return match[1]
            self.check()
            time.sleep(0.05)
        raise DistransError(f"{log} did not show what was expected within {timeout_s:.0f} s.")

    def stop(self) -> None:
        """Ask all to end, then insist."""
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        give_up_at = time.monotonic() + 20
        for process in self._running.values():
            try:
                process.wait(max(0.1, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
