"""The floor of a round: what the same bytes cost without HTTP, a database or any checks.

Each client in turn receives the model and sends an update over a loopback socket. The other side adds the updates up in
float64, divides, and writes the mean to one fsynced file.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

_BYTES_PER_WEIGHT = 4


class Floor:
    """Open connections of all clients, and the buffers of both sides."""

    def __init__(self, pairs: list[tuple[socket.socket, socket.socket]], size_bytes: int, folder: Path) -> None:
        self._pairs, self._file = pairs, folder / "floor"
        weights = size_bytes // _BYTES_PER_WEIGHT
        self._model = np.random.default_rng(0).normal(size=weights).astype(np.float32)
        self._received, self._update = np.empty_like(self._model), np.empty_like(self._model)
        self._sum = np.empty(weights)

    def run_round(self) -> float:
        """Run one round; return its seconds."""
        started = time.perf_counter()
        clients = threading.Thread(target=self._send_updates, daemon=True)
        clients.start()
        self._sum[:] = 0
        for ours, _ in self._pairs:
            ours.sendall(self._model.data.cast("B"))
            _receive(ours, self._received)
            self._sum += self._received
        clients.join()
        with self._file.open("wb") as handle:
            handle.write((self._sum / len(self._pairs)).astype(np.float32).data.cast("B"))
            handle.flush()
            os.fsync(handle.fileno())
        seconds = time.perf_counter() - started
        self._file.unlink()
        return seconds

    def _send_updates(self) -> None:
        with suppress(OSError):  # closed because the round was interrupted
            for _, theirs in self._pairs:
                _receive(theirs, self._update)
                theirs.sendall(self._update.data.cast("B"))


@contextmanager
def open_floor(clients: int, size_bytes: int, folder: Path) -> Iterator[Floor]:
    """Connect all clients; close the connections at the end of the block."""
    pairs: list[tuple[socket.socket, socket.socket]] = []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listening:
            for _ in range(clients):
                theirs = socket.create_connection(listening.getsockname())
                pairs.append((listening.accept()[0], theirs))
        yield Floor(pairs, size_bytes, folder)
    finally:
        for pair in pairs:
            for one in pair:
                one.close()


def _receive(connection: socket.socket, into: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> None:
    view = into.data.cast("B")
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other side of the floor closed its connection")
        view = view[count:]
