"""Fast starts for the project's programs: forks of a process that has already imported torch.

A fork server listens on a Unix socket and forks twice per call. The inner process takes over the caller's arguments,
working directory, environment, limits and streams, then runs the program's `main` as a console script would. The outer
process reports the program's process id and, later, its exit code. There are two ways to call the server:

- `ForkedProgram`, for tests that need a separate process: one to kill, or one that shares nothing but the database;
- `warm_programs`, a folder to put first on the PATH, for shells and for programs that start others by name.

Tests of a console script or of startup itself must start the program the normal way.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

PACKAGES = {"distrans-server": "server", "distrans-agent": "client_agent", "distrans-lab": "lab"}
PYTHON = "python-m"  # replaces Python when a program starts another one with `python -m`
STRICT = "error::ResourceWarning"  # a value of PYTHONWARNINGS; forks apply it themselves, Python reads it earlier
PRELOADED = ("torchvision.transforms.v2", "sklearn.datasets", "alembic", "server.http.serve", "client_agent.process")

# The scripts on the PATH: pass everything to the fork server, forward signals, exit with the program's code.
_SCRIPT = """\
#!{python} -IS
import array, json, os, resource, signal, socket, sys

with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    call = [{package_and_arguments}, os.getcwd(), dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)]
    text = json.dumps(call).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    line.sendmsg([len(text).to_bytes(4, "big")], streams)
    line.sendall(text)
    program = int.from_bytes(line.recv(4, socket.MSG_WAITALL), "big")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(program, number))
    code = int.from_bytes(line.recv(4, socket.MSG_WAITALL), "big", signed=True)
    sys.exit(code if code >= 0 else 128 - code)
"""


@contextmanager
def fork_server() -> Iterator[Path]:
    """Run a fork server and yield the path of its socket; kill everything it started when the block ends."""
    with TemporaryDirectory() as folder:  # tmp_path may exceed the length limit of socket paths
        address = Path(folder) / "socket"
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, address],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield address
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            server.stdout.close()


@contextmanager
def warm_programs() -> Iterator[Path]:
    """Yield a folder with the programs; kill everything started from it when the block ends."""
    calls = {program: f"{package!r}, sys.argv[1:]" for program, package in PACKAGES.items()}
    with fork_server() as address:
        for program, call in (calls | {PYTHON: "sys.argv[2], sys.argv[3:]"}).items():
            script = address.parent / program
            script.write_text(_SCRIPT.format(python=sys.executable, address=str(address), package_and_arguments=call))
            script.chmod(0o755)
        yield address.parent


@functools.cache
def _session_server() -> Path:
    server = fork_server()
    atexit.register(server.__exit__, None, None, None)
    return server.__enter__()


class ForkedProgram:
    """A running program, with the part of subprocess.Popen that tests use."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> None:
        self._command = command
        reading, writing = os.pipe()
        call = [
            PACKAGES[command[0]],
            list(command[1:]),
            str(cwd or Path.cwd()),
            dict(os.environ) | dict(environment),
            resource.getrlimit(resource.RLIMIT_NOFILE),
        ]
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(str(_session_server()))
        with Path(os.devnull).open() as nothing:
            text, streams = json.dumps(call).encode(), [nothing.fileno(), writing, writing]
            socket.send_fds(self._line, [len(text).to_bytes(4, "big")], streams)
            self._line.sendall(text)
        os.close(writing)
        self.stdout: IO[str] = os.fdopen(reading, encoding="utf-8")
        self.pid = int.from_bytes(self._line.recv(4, socket.MSG_WAITALL), "big")
        self._code: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        with self._line:
            self._code = int.from_bytes(self._line.recv(4, socket.MSG_WAITALL), "big", signed=True)
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the program to end and return its exit code; negative means a signal."""
        if not self._ended.wait(timeout) or self._code is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the program has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may be ending right now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _serve(address: str) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    for method in importlib.import_module("shared.learning.methods").METHODS.values():
        _ = method.server, method.client  # which imports them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.freeze()  # garbage collection in a fork would copy every page
        print("ready", flush=True)  # noqa: T201 - fork_server() waits for this
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(line)
                return
            line.close()


def _answer(line: socket.socket) -> None:
    size, streams, _, _ = socket.recv_fds(line, 4, 3)
    call = json.loads(line.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    program = os.fork()
    if program == 0:
        line.close()
        _become(streams, *call)
        return
    for stream in streams:
        os.close(stream)
    line.sendall(program.to_bytes(4, "big"))
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError, ConnectionResetError):  # the caller may have died
        line.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(
    streams: Sequence[int],
    package: str,
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    open_files: tuple[int, int],
) -> None:
    """Take over what the caller passed and run the program."""
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # always a TextIOWrapper here
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(open_files))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONWARNINGS") == STRICT:
        warnings.simplefilter("error", ResourceWarning)
    sys.argv = [next((name for name, known in PACKAGES.items() if known == package), package), *arguments]
    sys.executable = shutil.which(PYTHON, path=environment["PATH"]) or sys.executable
    from support import interrupts

    code = 1
    # Registered first, so runs last: skips the teardown of the loaded libraries, which takes a second.
    atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(code)))
    interrupts.install()
    try:
        importlib.import_module(f"{package}.__main__").main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


if __name__ == "__main__":
    _serve(sys.argv[1])
