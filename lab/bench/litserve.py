"""LitServe with the same network, decoding and batches as the agent, in an environment of its own.

Its processes are stopped between LitServe's turns, because its worker polls for requests all the time. It has no
telemetry.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from lab.bench.predict_network import Served
from lab.demo.processes import Processes
from shared.contract.errors import DistransError

REQUIREMENT = "litserve==0.2.*"
_SERVER = Path(__file__).parent / "litserve_app" / "server.py"
_NAME = "litserve"
_START_S = 120.0
# LitServe's default, which measured fastest: a batch is what waits. Its worker polls all the time, but as it is stopped
# between its turns, that costs the others nothing.
_BATCH_TIMEOUT_S = 0.0


class LitServe:
    """A running server that is stopped until its next turn."""

    def __init__(self, process_id: int, port: int) -> None:
        self.process_id, self.port = process_id, port

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run until the end of the block."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with suppress(ProcessLookupError):  # it has ended; the next call says so
            os.killpg(self.process_id, number)


@contextmanager
def open_litserve(
    processes: Processes, programs: Path, folder: Path, backbone: str, served: Served, max_batch: int, threads: int
) -> Iterator[LitServe]:
    """Start a server; stop it at the end of the block."""
    folder.mkdir(parents=True)
    port = _free_port()
    description = {
        "packages": [place for place in sys.path if place],
        "backbone": backbone,
        "served": served,
        "max_batch": max_batch,
        "batch_timeout_s": _BATCH_TIMEOUT_S,
        "threads": threads,
        "port": port,
    }
    file = folder / "description.json"
    file.write_text(json.dumps(description))
    command: list[str | Path] = [programs / "python", _SERVER, file]
    processes.start_program(_NAME, command, TMPDIR=str(folder), OMP_NUM_THREADS=str(threads))
    server = LitServe(processes.process_id(_NAME), port)
    try:
        _await_health(processes, port)
        server.signal(signal.SIGSTOP)
        yield server
    finally:
        server.signal(signal.SIGKILL)  # it keeps nothing, and its parts would wait for each other


def _await_health(processes: Processes, port: int) -> None:
    """Wait until its worker has built the network."""
    give_up_at = time.monotonic() + _START_S
    while time.monotonic() < give_up_at:
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                return
        processes.pause(0.2)
    raise DistransError(
        f"LitServe did not start within {_START_S:.0f} s.", next_step="Measure without --with-litserve."
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port
