"""A program of this project as a fork of a process that has loaded everything: a start takes moments, not seconds.

For tests that need a process of its own: one that can be killed, or that shares nothing but the database. Where the
console script, its end, or its own children are the point, start it as a person would.
"""

import importlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from support import interrupts

PACKAGES = {"distrans-server": "server", "distrans-agent": "client_agent"}
STRICT = "error::ResourceWarning"  # for PYTHONWARNINGS, which Python reads before the fork
# One process to fork from serves all of a test session's programs.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["server.__main__", "server.serve", "server.app", "client_agent.run", "torchvision.transforms.v2"]
    + [f"shared.methods.{name}" for name in ("advprop", "distrans", "fedaws", "mixup", "moon", "pfedhn", "pfedme")]
)


class ForkedProgram:
    """The part of subprocess.Popen that tests use."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._program = command[0]
        reading, writing = _CONTEXT.Pipe(duplex=False)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Not the forked process' own environment, but that of the test: it may have changed since the first fork.
        whole = dict(os.environ) | dict(environment)
        self._process = _CONTEXT.Process(target=_run, args=(writing, list(command), whole, limit), daemon=True)
        self._process.start()
        writing.close()
        self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        reading.close()
        self._polling = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with self._polling:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; its exit code."""
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._program, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Any signal; one that has ended gets none."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may end just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


def _run(output: Connection, command: list[str], environment: dict[str, str], limit: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if environment.get("PYTHONWARNINGS") == STRICT:
        warnings.simplefilter("error", ResourceWarning)
    import torch

    torch.set_num_threads(1)
    sys.argv = command
    interrupts.install()
    importlib.import_module(f"{PACKAGES[command[0]]}.__main__").main()
