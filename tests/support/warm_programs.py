"""The project's programs on a PATH, without the seconds that each start spends on loading torch.

One process loads the libraries, and nothing of this project. For each command it forks: the fork takes over the
caller's arguments, folder, environment and streams, loads the program and runs its `main`, as a console script does.
"""

import array
import atexit
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

PYTHON = "python-m"  # stands in for Python where a program starts another one with `python -m`
PROGRAMS = {
    "distrans-server": "'server', sys.argv[1:]",
    "distrans-agent": "'client_agent', sys.argv[1:]",
    "distrans-lab": "'lab', sys.argv[1:]",
    PYTHON: "sys.argv[2], sys.argv[3:]",
}
LIBRARIES = ("torch", "torchvision.transforms.v2", "sklearn.datasets", "fastapi", "uvicorn", "sqlalchemy", "alembic")

# What is on the PATH: hands everything to the loaded process, passes signals on, ends with the program's exit code.
_CALLER = """\
#!{python} -IS
import array, json, os, signal, socket, sys

with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    call = json.dumps([{module_and_arguments}, os.getcwd(), dict(os.environ)]).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    line.sendmsg([len(call).to_bytes(4, "big")], streams)
    line.sendall(call)
    child = int.from_bytes(line.recv(4, socket.MSG_WAITALL), "big")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(child, number))
    sys.exit(int.from_bytes(line.recv(1), "big"))
"""


@contextmanager
def warm_programs() -> Iterator[Path]:
    """A folder with the programs, for the front of a PATH; all that was started with them ends with the block."""
    with TemporaryDirectory() as name:  # a socket's path must be short
        folder = Path(name)
        address = folder / "socket"
        for program, call in PROGRAMS.items():
            text = _CALLER.format(python=sys.executable, address=str(address), module_and_arguments=call)
            (folder / program).write_text(text)
            (folder / program).chmod(0o755)
        loaded = subprocess.Popen(
            [sys.executable, "-P", __file__, address],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert loaded.stdout is not None
        try:
            assert loaded.stdout.readline() == b"ready\n"
            yield folder
        finally:
            os.killpg(loaded.pid, signal.SIGKILL)
            loaded.wait()
            loaded.stdout.close()


def _answer_calls(address: str) -> None:
    for library in LIBRARIES:
        importlib.import_module(library)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.freeze()  # a collection in a fork would copy all pages
        print("ready", flush=True)  # noqa: T201 - for the process that started this one
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
    """Fork once more: the inner process becomes the program, the outer one reports how it ended."""
    size, ancillary, _, _ = line.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i", ancillary[0][2])
    call = json.loads(line.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    child = os.fork()
    if child == 0:
        line.close()
        _become(streams, *call)
    for stream in streams:
        os.close(stream)
    line.sendall(child.to_bytes(4, "big"))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    line.sendall((code if code >= 0 else 128 - code).to_bytes(1, "big"))
    line.close()
    os._exit(0)


def _become(
    streams: Iterable[int], module: str, arguments: list[str], folder: str, environment: dict[str, str]
) -> None:
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    sys.executable = shutil.which(PYTHON, path=environment["PATH"]) or sys.executable
    code = 1
    # The last of the exit handlers, as the first registered: taking the loaded libraries apart takes a second.
    atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(code)))
    try:
        importlib.import_module(f"{module}.__main__").main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


if __name__ == "__main__":
    _answer_calls(sys.argv[1])
