"""A coordinator inside the test process: through its ASGI interface, or on a real socket."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support.coordinator import ADMIN_TOKEN, Coordinator
from support.databases import new_postgres_database

from server.app import create_app
from server.settings import Settings
from server.store.schema import upgrade
from server.store.session import Database
from shared.http.protocol import Protocol
from shared.http.tls import Tls

SCRAPE_TOKEN = "a-scrape-token-for-tests"
QUIET: dict[str, Any] = {
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
    "lifespan": "on",
    "loop": "asyncio",  # as in `serve`; uvloop accepts connections by itself
}


class Api(Coordinator):
    """An application of its own, called without a network in between."""

    def __init__(self, db_url: str, **settings: Any) -> None:
        self.db_url = db_url
        self.app: FastAPI = create_app(Settings(db_url, ADMIN_TOKEN, SCRAPE_TOKEN, **settings))
        self.http: Any = TestClient(self.app)

    def call(self, method: str, path: str, token: str | None = ADMIN_TOKEN, **options: Any) -> httpx.Response:
        """Any call, with any token or none."""
        headers = options.pop("headers", {}) | ({} if token is None else {"Authorization": f"Bearer {token}"})
        return self.http.request(method, path, headers=headers, **options)


@contextmanager
def open_api(db_url: str, **settings: Any) -> Iterator[Api]:
    """An application whose background threads run."""
    api = Api(db_url, **settings)
    with api.http:
        yield api


class SocketApi(Api):
    """The same behind a real HTTP server, in a thread."""

    def __init__(
        self, db_url: str, tls: Tls | None = None, verify: ssl.SSLContext | bool = True, **settings: Any
    ) -> None:
        super().__init__(db_url, **settings)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._listening.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=120, trust_env=False, verify=verify)
        options = QUIET | (tls.options() if tls else {})
        self._server = uvicorn.Server(uvicorn.Config(self.app, http=Protocol, **options))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]}, daemon=True)

    def __enter__(self) -> "SocketApi":
        self._thread.start()
        assert self.call("GET", "/readyz").status_code == 200  # the connection waits in the queue until it is up
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()


class RawConnection:
    """Sends exactly the bytes it is told to, and reads one answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=60)

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send_head(self, method: str, path: str, **headers: Any) -> None:
        """The request line and headers; underscores in their names stand for hyphens."""
        lines = [f"{method} {path} HTTP/1.1", "Host: coordinator"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "", ""]).encode())

    def send(self, data: bytes) -> None:
        """Some bytes of the body."""
        self.socket.sendall(data)

    def send_chunk(self, data: bytes) -> None:
        """A piece of a body in chunked transfer coding; an empty one ends it."""
        self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def answer(self) -> tuple[int, bytes]:
        """Status and body; the server must say how long the body is."""
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


def new_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The address of a database with the current schema; for fixtures that outlive one test."""
    if kind == "sqlite":
        url = f"sqlite:///{folder / 'coordinator.db'}"
    else:
        url = new_postgres_database(request.getfixturevalue("postgres_url"))
    db = Database(url)
    upgrade(db)
    db.close()
    return url
