"""A program of this project as a child process whose output can be waited for."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from support.forked import ForkedProgram
from support.log_lines import LogLines

PROGRAMS = Path(sys.executable).parent


class LoggedProcess:
    """A child process; its output is kept in `lines`."""

    def __init__(
        self, command: Sequence[str | Path], cwd: Path | None = None, *, forked: bool = False, **environment: str
    ) -> None:
        self.process: subprocess.Popen[str] | ForkedProgram
        if forked:
            self.process = ForkedProgram([str(word) for word in command], environment)
        else:
            self.process = subprocess.Popen(
                [PROGRAMS / command[0], *command[1:]],
                cwd=cwd,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._log = LogLines()
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def lines(self) -> list[str]:
        """Its output so far."""
        return self._log.lines

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.add(line.rstrip("\n"))
        self.process.wait()
        self._over.set()
        self._log.wake()  # who waits for a line looks whether one can still come

    def wait_for_line(self, pattern: str, timeout_s: float = 90) -> str:
        """The first group (or the whole) of the first line that matches."""
        return self._log.wait_for(pattern, self._over.is_set, timeout_s)

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
