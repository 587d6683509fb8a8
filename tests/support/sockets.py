"""Real connections: an ASGI application on a socket, and clients that send raw bytes."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import uvicorn

from shared.http.server_protocol import Protocol

QUIET: dict[str, Any] = {
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
    "loop": "asyncio",  # as in `serve`: uvloop accepts connections itself, past our listener
}


@contextmanager
def serving(
    app: Any, wrap: Callable[[socket.socket], socket.socket] = lambda listening: listening, **options: Any
) -> Iterator[str]:
    """Serve an ASGI application with our HTTP protocol and yield its URL; `wrap` may replace the listening socket."""
    bound = socket.create_server(("127.0.0.1", 0), backlog=128)
    listening = wrap(bound)
    server = uvicorn.Server(uvicorn.Config(app, http=Protocol, **QUIET | {"lifespan": "off"} | options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    scheme = "https" if "ssl_certfile" in options else "http"
    try:
        yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
        bound.close()


class RawConnection:
    """A client that sends exactly the bytes it is given and reads one response."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send_head(self, method: str, path: str, **headers: Any) -> None:
        """Send the request line and headers; underscores in header names become hyphens."""
        lines = [f"{method} {path} HTTP/1.1", "Host: coordinator"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "", ""]).encode())

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.socket.sendall(data)

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk of a chunked body; an empty chunk ends it."""
        self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def answer(self) -> tuple[int, bytes]:
        """Read the status and the body, which needs a Content-Length."""
        with self.socket.makefile("rb") as stream:
            status = int(stream.readline().split()[1])
            length = 0
            while (line := stream.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            return status, stream.read(length)

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def read_to_end(connection: RawConnection) -> bytes:
    """Read until the server ends the connection; time out if it does not."""
    received = b""
    try:
        while data := connection.socket.recv(65536):
            received += data
    except ConnectionError:  # a reset ends it too
        pass
    return received


def is_ended(connection: RawConnection, within_s: float) -> bool:
    """Return whether the server resets the connection in time, without reading what it sent."""
    poll = select.poll()
    poll.register(connection.socket, select.POLLHUP | select.POLLERR)
    return bool(poll.poll(within_s * 1000))


def send_until_cut(connection: RawConnection, piece: bytes, at_most: int) -> int:
    """Send the piece repeatedly until the server ends the connection; return the bytes accepted."""
    sent = 0
    try:
        while sent < at_most:
            connection.send(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent
