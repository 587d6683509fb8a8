"""A TCP proxy that cuts a conversation at a chosen point of a request."""

import contextlib
import socket
import threading
from typing import Literal

from support.tcp_server import TcpServer, close, disconnect

Cut = Literal["before-request", "half-request", "before-response"]


class CuttingProxy(TcpServer):
    """Forwards to a local port. Once armed, cuts the next matching request and leaves its connection hanging."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._armed: tuple[bytes, Cut] | None = None
        self.cut = threading.Event()
        super().__init__()

    def arm(self, marker: bytes, where: Cut) -> None:
        """Cut the next request that contains the marker at this point, then set `cut`."""
        self.cut.clear()
        self._armed = (marker, where)

    def handle(self, client: socket.socket) -> None:
        """Forward both directions until one ends or the request is cut."""
        try:
            server = self.connect("127.0.0.1", self.target_port)
        except OSError:  # an absent coordinator looks like an absent proxy
            close(client)
            return
        held = threading.Event()
        threading.Thread(target=self._pump, args=(client, server, held, True), daemon=True).start()
        self._pump(server, client, held, is_request=False)

    def _pump(self, source: socket.socket, sink: socket.socket, held: threading.Event, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_request and not held.is_set() and self._armed and self._armed[0] in data:
                    where, self._armed = self._armed[1], None
                    held.set()
                    if where == "half-request":
                        sink.sendall(data[: len(data) // 2])
                    if where != "before-response":
                        self.cut.set()
                        return
                elif not is_request and held.is_set():
                    self.cut.set()
                    return
                sink.sendall(data)
        if not held.is_set():
            disconnect(source, sink)
