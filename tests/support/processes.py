"""Child processes whose output a test can wait for."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from support.launcher import ForkedProgram
from support.log_lines import LogLines

PROGRAMS = Path(sys.executable).parent


class LoggedProcess(LogLines):
    """A child process that collects its output in `lines`; `forked` starts it faster, see support.launcher."""

    def __init__(
        self, command: Sequence[str | Path], cwd: Path | None = None, *, forked: bool = False, **environment: str
    ) -> None:
        super().__init__()
        self.process: subprocess.Popen[str] | ForkedProgram
        if forked:
            self.process = ForkedProgram([str(word) for word in command], environment, cwd)
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
            self._add_line(line.rstrip("\n"))
        self.process.wait()
        self._end_log()

    def kill(self) -> None:
        """Send SIGKILL and wait for the process to end."""
        self.process.kill()
        self.wait()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def stop_and_read(self) -> str:
        """Send SIGTERM and return everything the process has written."""
        self.stop()
        return "\n".join(self.lines)

    def wait(self, timeout_s: float = 90) -> int:
        """Wait for the process to end and return its exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code
