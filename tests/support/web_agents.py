"""The agent's web service on a socket, for attacks on it."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

import httpx
from support.agent_service import Service, bundle, image

from client_agent.settings import ServeOptions
from client_agent.web import serve

PNG = image()
MIB = 1024 * 1024


class WebAgent(Service):
    """The web service on a socket; `http` calls it."""

    port: int

    def connect(self) -> socket.socket:
        """Open a connection that sends nothing."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def raw(self, *lines: str, body: bytes = b"") -> socket.socket:
        """Open a connection and send these header lines and this much of the body."""
        connection = self.connect()
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return connection

    def head(self, kind: str, length: int, *more: str) -> list[str]:
        """Return the header lines of a request to /predict."""
        announced = [f"Content-Type: {kind}", f"Content-Length: {length}"]
        return ["POST /predict HTTP/1.1", "Host: 127.0.0.1", *announced, *more]

    def ask(self, path: str, **headers: str) -> httpx.Response:
        """GET, or POST an image to /predict."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if path != "/predict":
            return self.http.get(path, headers=named)
        return self.http.post(path, content=PNG, headers={"content-type": "image/png"} | named)


@contextmanager
def web_agent(**options: Any) -> Iterator[WebAgent]:
    """Serve with these options until the end of the block."""
    chosen = ServeOptions(port=0, **options)
    one = WebAgent(chosen, bundle())
    scheme, verify = ("http", True) if chosen.tls is None else ("https", False)
    with serve.web_server(one.app, chosen) as one.port, httpx.Client(verify=verify, trust_env=False) as one.http:
        one.http.base_url = f"{scheme}://127.0.0.1:{one.port}"
        yield one
    one.queue.stop()


def last_answer(connection: socket.socket) -> tuple[int, Any]:
    """Return status and JSON of the first response, which must be the connection's last one."""
    with connection, HTTPResponse(connection) as answer:
        assert connection.recv(12, socket.MSG_PEEK) != b"HTTP/1.1 100", "the service asked for the body"
        answer.begin()
        assert answer.getheader("connection") == "close"
        return answer.status, json.loads(answer.read())
