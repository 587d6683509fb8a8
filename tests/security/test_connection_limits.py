"""Limits on connections, in total and per address: one peer can neither exhaust files nor lock others out."""

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from support.coordinator import ADMIN_TOKEN, running
from support.sockets import RawConnection, serving

from server.http.serve import connection_limits
from server.service.settings import Settings
from shared.contract.errors import DistransError
from shared.http.listener import Listener


async def hello(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def is_refused(connection: RawConnection) -> bool:
    """Return whether the server closed the connection without a response."""
    try:
        return connection.socket.recv(1) == b""
    except ConnectionResetError:
        return True


def is_served(url: str) -> bool:
    with RawConnection(url) as connection:
        try:
            connection.send_head("GET", "/")
            return connection.socket.recv(12) == b"HTTP/1.1 204"
        except ConnectionError:
            return False


@contextmanager
def silent(url: str, number: int) -> Iterator[list[RawConnection]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RawConnection(url)) for _ in range(number)]


def test_connections_over_the_total_are_refused_until_others_close() -> None:
    with serving(hello, lambda listening: Listener(listening, total=3, per_address=0)) as url:
        with silent(url, 3):
            assert not is_served(url)
        while not is_served(url):  # until the server notices that they are gone
            pass


def test_the_limit_per_address_exempts_trusted_proxies() -> None:
    with serving(hello, lambda listening: Listener(listening, total=0, per_address=3)) as url, silent(url, 3):
        assert not is_served(url)
    proxies = ["127.0.0.0/8"]
    with (
        serving(hello, lambda listening: Listener(listening, total=0, per_address=3, exempt=proxies)) as url,
        silent(url, 3),
    ):
        assert is_served(url)


def test_unfinished_tls_handshakes_count() -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    with (
        certificate.private_key_and_cert_chain_pem.tempfile() as chain,
        serving(hello, lambda listening: Listener(listening, total=3, per_address=0), ssl_certfile=chain) as url,
        silent(url, 3),
        RawConnection(url) as fourth,
    ):
        assert is_refused(fourth)


def test_one_address_at_its_limit_does_not_affect_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRANS_MAX_CONNECTIONS", "40")  # half of them per address
    with (
        running(f"sqlite:///{tmp_path / 'coordinator.db'}", tmp_path, forked=True) as coordinator,
        silent(coordinator.url, 20),
    ):
        with RawConnection(coordinator.url) as one_more:
            assert is_refused(one_more)
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=elsewhere, base_url=coordinator.url, timeout=60) as other:
            assert other.get("/readyz").status_code == 200
    assert any("refused a connection from 127.0.0.1" in line for line in coordinator.lines)


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_some_open_files_are_reserved() -> None:
    assert connection_limits(settings()) == (896, 448)
    assert connection_limits(settings(max_connections=100)) == (100, 50)
    assert connection_limits(settings(max_connections=100, connections_per_address=7)) == (100, 7)
    with pytest.raises(DistransError, match="1024 open files can serve at most 896 connections"):
        connection_limits(settings(max_connections=1000))


def settings(**fields: int) -> Settings:
    return Settings("sqlite://", ADMIN_TOKEN, **fields)
