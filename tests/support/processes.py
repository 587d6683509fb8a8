"""A program of this project as a child process whose output can be waited for."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from support.forked_server import ForkedServer

PROGRAMS = Path(sys.executable).parent


class LoggedProcess:
    """A child process; its output is kept in `lines`."""

    def __init__(
        self, command: Sequence[str | Path], cwd: Path | None = None, *, forked: bool = False, **environment: str
    ) -> None:
        self.lines: list[str] = []
        self._seen = threading.Condition()
        self.process: subprocess.Popen[str] | ForkedServer
        if forked:
            assert command[0] == "distrans-server"
            self.process = ForkedServer([str(word) for word in command[1:]], environment)
        else:
            self.process = subprocess.Popen(
                [PROGRAMS / command[0], *command[1:]],
                cwd=cwd,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._seen:
                self.lines.append(line.rstrip("\n"))
                self._seen.notify_all()
        self.process.wait()  # who waits for a line looks whether one can still come
        with self._seen:
            self._seen.notify_all()

    def wait_for_line(self, pattern: str, timeout_s: float = 90) -> str:
        """The first group (or the whole) of the first line that matches."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._seen:
            self._seen.wait_for(lambda: found() or self.process.poll() is not None, timeout_s)
        self._reader.join(0 if self.process.poll() is None else 10)
        match = found()
        assert match, "no such line in the log:\n" + "\n".join(self.lines)
        return match[1] if match.re.groups else match[0]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def stop_and_read(self) -> str:
        """SIGTERM; all that it has written."""
        self.stop()
        return "\n".join(self.lines)

    def wait(self, timeout_s: float = 90) -> int:
        """Until it ends by itself; the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code
