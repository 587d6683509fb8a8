"""Flower in deployment mode, with as many nodes and bytes: a SuperLink, its ServerApp, and nodes that do not train.

All nodes run in one process, which is stopped between Flower's rounds so that their polling does not slow down what is
measured in turn with it. Nothing leaves the machine: telemetry and the search for updates are off.
"""

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from lab.demo.processes import Processes
from shared.contract.errors import DistransError

REQUIREMENT = "flwr==1.41.*"  # the nodes use functions that other releases may lack
_APP = Path(__file__).parent / "flower_app"
_START_S, _ROUND_S = 120.0, 3600.0
_PROJECT = """\
[project]
name = "distrans-bench"
version = "1.0.0"
description = "FedAvg without training."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "distrans"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "server_app:client"

[tool.flwr.app.config]
port = 0
"""
_CONNECTION = """\
[superlink]
default = "bench"

[superlink.bench]
address = "{address}"
insecure = true
"""


class Flower:
    """A running federation that waits for its next round."""

    def __init__(self, processes: Processes, connection: socket.socket, bench: TextIO) -> None:
        self._processes, self._connection, self._bench = processes, connection, bench
        self._nodes = processes.process_id("flower-nodes")

    def run_round(self) -> float:
        """Run one round; return its seconds, from sending the model to the mean of all replies."""
        os.kill(self._nodes, signal.SIGCONT)
        try:
            self._bench.write("round\n")
            self._bench.flush()
            answer = json.loads(self._read_line())
        finally:
            os.kill(self._nodes, signal.SIGSTOP)
        if not answer["aggregated"]:
            raise DistransError("A Flower node failed.", next_step="Try again, or measure without --with-flower.")
        return float(answer["seconds"])

    def await_ready(self) -> None:
        """Wait until all nodes are connected."""
        self._read_line()
        os.kill(self._nodes, signal.SIGSTOP)

    def close(self) -> None:
        """Let the nodes receive the signal that ends them."""
        os.kill(self._nodes, signal.SIGCONT)

    def _read_line(self) -> str:
        """Return a line of the ServerApp; raise if one of Flower's programs ends."""
        give_up_at = time.monotonic() + _ROUND_S
        while time.monotonic() < give_up_at:
            if select.select([self._connection], [], [], 0.2)[0]:
                break
            self._processes.pause(0)
        line = self._bench.readline()
        if not line:
            raise DistransError("Flower's ServerApp ended early.", next_step="Measure without --with-flower.")
        return line


@contextmanager
def open_flower(processes: Processes, programs: Path, folder: Path, clients: int, sizes: list[int]) -> Iterator[Flower]:
    """Start a SuperLink and nodes with models of arrays of these sizes; `processes` stops them."""
    app, home = folder / "app", folder / "home"
    for place in (app, home):
        place.mkdir(parents=True)
    address = f"127.0.0.1:{_free_port()}"
    (app / "pyproject.toml").write_text(_PROJECT)
    (app / "server_app.py").write_text((_APP / "server_app.py").read_text())
    (home / "config.toml").write_text(_CONNECTION.format(address=address))
    description = folder / "description.json"
    description.write_text(json.dumps({"clients": clients, "sizes": sizes}))
    environment = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # Flower starts its programs by name
    }
    host, _, port = address.partition(":")
    link = ["--insecure", "--host", host, "--port", port, "--disable-runtime-dependency-installation"]
    log = processes.start_program("flower-superlink", [programs / "flower-superlink", *link], **environment)
    processes.wait_for(log, r"(Uvicorn running on)", _START_S)
    nodes: list[str | Path] = [programs / "python", _APP / "nodes.py", address, description]
    processes.start_program("flower-nodes", nodes, **environment)
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(_START_S)
        run = [programs / "flwr", "run", app, "bench", "--run-config", f"port={listening.getsockname()[1]}"]
        _call([str(word) for word in run], environment)
        try:
            connection = stack.enter_context(listening.accept()[0])
        except TimeoutError as error:
            raise DistransError(
                f"Flower's ServerApp did not start within {_START_S:.0f} s.",
                next_step="Measure without --with-flower.",
            ) from error
        connection.settimeout(_START_S)
        bench = stack.enter_context(connection.makefile("rw"))
        bench.write(description.read_text() + "\n")
        bench.flush()
        flower = Flower(processes, connection, bench)
        stack.callback(flower.close)
        flower.await_ready()
        yield flower


def _call(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise DistransError(
            f"Flower refused the run: {done.stderr.strip()[-500:]}", next_step="Measure without --with-flower."
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port
