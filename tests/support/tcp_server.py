"""A TCP server on a free local port, for proxies and servers that misbehave."""

import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self


class TcpServer(ABC):
    """Runs `handle` in a thread for every connection; as a context manager, closes all of them at the end."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._connections: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @abstractmethod
    def handle(self, client: socket.socket) -> None:
        """Serve one connection. It stays open after the return unless closed here."""

    def connect(self, host: str | None, port: int | None) -> socket.socket:
        """Open a connection that is closed with the server."""
        connection = socket.create_connection((host, port))
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        """Stop listening and close all connections."""
        close(self._listener)
        self._accepting.join()
        for connection in self._connections:
            close(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # raised once the listener is shut down
            while True:
                client, _ = self._listener.accept()
                self._connections.append(client)
                threading.Thread(target=self.handle, args=(client,), daemon=True).start()


def disconnect(*connections: socket.socket) -> None:
    """Shut the connections down, which wakes threads blocked on them; closing alone does not."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def close(connection: socket.socket) -> None:
    """Shut down and close a socket."""
    disconnect(connection)
    connection.close()
