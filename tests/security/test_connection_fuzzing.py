"""Connections end, whatever bytes they carry, and cause no logged error."""

import logging
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api import SocketApi
from support.coordinator import ADMIN_TOKEN
from support.databases import new_database
from support.sockets import RawConnection, read_to_end

from shared.http.server_protocol import Protocol

ADMIN = f"Authorization: Bearer {ADMIN_TOKEN}\r\n"
HEADS = [
    f"{method} {path} HTTP/{version}\r\nHost: coordinator\r\n{headers}"
    for method in ("GET", "POST", "PUT", "HEAD")
    for path in ("/healthz", "/nowhere", "/v1/federations", "/v1/rounds/1/update", "/v1/task?wait=0")
    for version in ("1.0", "1.1")
    for headers in ("", ADMIN, ADMIN + "Content-Type: application/json\r\n")
]
HEADERS = [
    "Content-Length: 0\r\n",
    "Content-Length: 10\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Expect: 100-continue\r\n",
    "Connection: close\r\n",
    "Connection: Upgrade\r\nUpgrade: websocket\r\n",
    "Upgrade: foo\r\n",
    "X: " + 40_000 * "x" + "\r\n",
]
REST = ["\r\n", "\r\n\r\n", "0\r\n", "5\r\nhello\r\n", "5\r\nhe", "X-Trailer: 1\r\n", "{}", "{", "\x00", "\n", "GET "]
REQUESTS = st.builds(
    lambda head, headers, rest: "".join([head, *headers, "\r\n", *rest]),
    st.sampled_from(HEADS),
    st.lists(st.sampled_from(HEADERS), max_size=2),
    st.lists(st.sampled_from(REST), max_size=3),
)
FRAGMENTS = st.one_of(REQUESTS, st.sampled_from(REST), st.text(max_size=5))


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    url = new_database("sqlite", request, tmp_path_factory.mktemp("fuzzing"))
    with pytest.MonkeyPatch.context() as patch, SocketApi(url, requests_per_s=0, json_body_s=0.02) as api:
        for name in ("head_s", "body_s", "send_s", "linger_s"):
            patch.setattr(Protocol, name, 0.02)
        yield api


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fragments=st.lists(FRAGMENTS, max_size=5))
def test_arbitrary_bytes_never_cause_a_logged_error(
    api: SocketApi, caplog: pytest.LogCaptureFixture, fragments: list[str]
) -> None:
    caplog.clear()
    with RawConnection(api.url) as connection:
        with suppress(ConnectionError):
            for fragment in fragments:
                connection.send(fragment.encode())
        read_to_end(connection)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
