"""Any ASGI application behind real connections, with the protocol that the services use."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from support.api import QUIET, RawConnection

from shared.http.protocol import Protocol


@contextmanager
def serving(
    app: Any, wrap: Callable[[socket.socket], socket.socket] = lambda listening: listening, **options: Any
) -> Iterator[str]:
    """The application's address; `wrap` may put another socket in the place of the listening one."""
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


def read_to_end(connection: RawConnection) -> bytes:
    """All that comes until the server ends the connection; a server that does not makes the socket time out."""
    received = b""
    try:
        while data := connection.socket.recv(65536):
            received += data
    except ConnectionError:  # a reset is an end too
        pass
    return received


def is_ended(connection: RawConnection, within_s: float) -> bool:
    """Whether the server has reset the connection, without reading what it has sent."""
    poll = select.poll()
    poll.register(connection.socket, select.POLLHUP | select.POLLERR)
    return bool(poll.poll(within_s * 1000))


def send_until_cut(connection: RawConnection, piece: bytes, at_most: int) -> int:
    """Send the piece again and again until the server ends the connection; how many bytes were accepted."""
    sent = 0
    try:
        while sent < at_most:
            connection.send(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent
