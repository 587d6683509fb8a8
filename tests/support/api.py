"""A coordinator inside the test process: through its ASGI interface, or on a real socket."""

import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support.coordinator import ADMIN_TOKEN, Coordinator
from support.sockets import serving

from server.http.app import create_app
from server.service.settings import Settings
from shared.http.server_tls import Tls

SCRAPE_TOKEN = "a-scrape-token-for-tests"


class Api(Coordinator):
    """A coordinator application that is called without a network."""

    def __init__(self, db_url: str, **settings: Any) -> None:
        self.db_url = db_url
        self.app: FastAPI = create_app(Settings(db_url, ADMIN_TOKEN, SCRAPE_TOKEN, **settings))
        self.http: Any = TestClient(self.app)

    def call(self, method: str, path: str, token: str | None = ADMIN_TOKEN, **options: Any) -> httpx.Response:
        """Send any request, with any token or none."""
        headers = options.pop("headers", {}) | ({} if token is None else {"Authorization": f"Bearer {token}"})
        return self.http.request(method, path, headers=headers, **options)


@contextmanager
def open_api(db_url: str, **settings: Any) -> Iterator[Api]:
    """Yield an application whose background threads are running."""
    api = Api(db_url, **settings)
    with api.http:
        yield api


class SocketApi(Api):
    """A coordinator application behind a real HTTP server in a thread; `url` and `http` work inside the block."""

    url: str

    def __init__(
        self, db_url: str, tls: Tls | None = None, verify: ssl.SSLContext | bool = True, **settings: Any
    ) -> None:
        super().__init__(db_url, **settings)
        self._tls, self._verify = tls, verify

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            options = self._tls.options() if self._tls else {}
            self.url = stack.enter_context(serving(self.app, lifespan="on", **options))
            client = httpx.Client(base_url=self.url, timeout=120, trust_env=False, verify=self._verify)
            self.http = stack.enter_context(client)
            assert self.call("GET", "/readyz").status_code == 200  # waits in the backlog until the server is up
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()


def problem_of(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of an error, after checking that its body is a complete problem document."""
    problem = response.json()
    assert response.headers["Content-Type"] == "application/problem+json"
    assert problem["status"] == response.status_code
    assert problem["request_id"] == response.headers["X-Request-ID"]
    assert problem["title"]
    assert problem["detail"]
    return response.status_code, problem["code"]
