"""Connections from strangers end soon and cost little memory, whatever they send, omit or do not read."""

import asyncio
import json
import re
import select
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import trustme
from support.api import SocketApi
from support.coordinator import ADMIN_TOKEN
from support.databases import new_database
from support.sockets import RawConnection, is_ended, read_to_end, send_until_cut, serving

from shared.http.server_protocol import Protocol

MIB = 1024 * 1024
BUFFERS = 16 * MIB  # more than the kernel buffers
HOST = "Host: coordinator\r\n"


@pytest.fixture(autouse=True)
def _short_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the limits, but leave a busy machine time to send; well-behaved connections keep the real ones."""
    if request.cls is not TestGoodConnections:
        for name, limit_s in {"head_s": 1.0, "body_s": 2.0, "send_s": 1.0, "linger_s": 0.5}.items():
            monkeypatch.setattr(Protocol, name, limit_s)


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    url = new_database("sqlite", request, tmp_path_factory.mktemp("connections"))
    with SocketApi(url, json_body_s=1.0) as api:
        yield api


def statuses(received: bytes) -> list[int]:
    """Return the statuses of the responses in a stream."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


# What is sent first, what is sent after the response, and the statuses of all responses.
UNFINISHED = {
    "nothing": ("", "", []),
    "half a request line": ("GET /hea", "", [408]),
    "half a head": (f"GET /healthz HTTP/1.1\r\n{HOST}X-Wai", "", [408]),
    "an idle connection": (f"GET /healthz HTTP/1.1\r\n{HOST}\r\n", "", [200]),
    "half of a second head": (f"GET /healthz HTTP/1.1\r\n{HOST}\r\n", "GET /hea", [200, 408]),
    "a stray line break after a request": (f"GET /healthz HTTP/1.1\r\n{HOST}\r\n", "\r\n", [200, 400]),
    "one byte of an unread body": (f"GET /healthz HTTP/1.1\r\n{HOST}Content-Length: 10\r\n\r\n", "x", [200]),
    "a rejected upload": (f"PUT /v1/rounds/1/update HTTP/1.1\r\n{HOST}Content-Length: 1000\r\n\r\n", "x", [401]),
    "a partial chunk": (f"PUT /nowhere HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n", "5\r\nab", [404]),
    "an upgrade": (f"GET /healthz HTTP/1.1\r\n{HOST}Connection: Upgrade\r\nUpgrade: foo\r\n\r\n", "x", [200, 408]),
    "a body that does not come": (
        f"POST /v1/federations HTTP/1.1\r\n{HOST}Authorization: Bearer {ADMIN_TOKEN}\r\n"
        "Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{",
        "",
        [408],
    ),
}  # fmt: skip


def begin(connection: RawConnection, what: str) -> list[int]:
    """Send what the table says; return the statuses so far."""
    first, rest, _ = UNFINISHED[what]
    connection.send(first.encode())
    if not rest:
        return []
    status, _ = connection.answer()
    connection.send(rest.encode())
    return [status]


@pytest.mark.parametrize("what", UNFINISHED)
def test_every_unfinished_connection_ends(api: SocketApi, what: str) -> None:
    with RawConnection(api.url) as connection:
        found = begin(connection, what)
        assert found + statuses(read_to_end(connection)) == UNFINISHED[what][2]


@pytest.mark.parametrize("what", [name for name, (_, _, answers) in UNFINISHED.items() if answers])
def test_trickling_bytes_do_not_extend_the_deadline(api: SocketApi, what: str) -> None:
    with RawConnection(api.url) as connection:
        begin(connection, what)
        connection.socket.settimeout(0.02)  # paces this loop
        for _ in range(1000):
            try:
                if not connection.socket.recv(65536):
                    return
            except TimeoutError:
                with suppress(ConnectionError):  # the next read will show it
                    connection.send(b"x")
            except ConnectionError:
                return
        pytest.fail("the connection is still open")


CHUNKED = f"POST /v1/join HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n"
ENDLESS = {
    "many trailers": ("0\r\n", b"".join(b"X-%06d: trailer\r\n" % number for number in range(3000))),
    "one trailer": ("0\r\nX-Long: ", b"x" * 65536),
    "a chunk's extension": ("1;", b"x" * 65536),
    "empty lines": ("", b"\r\n" * 32768),
}


@pytest.mark.parametrize("authorization", ["", f"Authorization: Bearer {ADMIN_TOKEN}\r\n"], ids=["stranger", "admin"])
@pytest.mark.parametrize("what", ENDLESS)
def test_endless_framing_is_cut_off(api: SocketApi, what: str, authorization: str) -> None:
    start, piece = ENDLESS[what]
    with RawConnection(api.url) as connection:
        connection.send(f"{CHUNKED}{authorization}\r\n{start}".encode())
        assert send_until_cut(connection, piece, 4 * BUFFERS) < BUFFERS


def test_trailers_are_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an application waits for the end of a body, the memory for trailers is bounded."""
    for name in ("head_s", "body_s"):
        monkeypatch.setattr(Protocol, name, 60.0)
    messages: list[dict[str, Any]] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())

    with serving(app) as url, RawConnection(url) as connection:
        connection.send(f"{CHUNKED}\r\n0\r\n".encode())
        assert send_until_cut(connection, ENDLESS["many trailers"][1], 4 * BUFFERS) < BUFFERS
        assert statuses(read_to_end(connection)) in ([431], [])  # a reset may have overtaken the response
    assert messages[-1]["type"] == "http.disconnect"


SMUGGLED = {
    "two kinds of framing": "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "two lengths in one line": "Content-Length: 5, 6\r\n\r\nhello",
    "a length with a sign": "Content-Length: +5\r\n\r\nhello",
    "a length with a letter": "Content-Length: 5x\r\n\r\nhello",
    "a coding in another": "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding that only looks like one": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a control character in a name": "X\x00: 1\r\n\r\n",
    "a size that is no number": "Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk that is too long": "Transfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("what", SMUGGLED)
def test_requests_with_ambiguous_framing_are_refused(api: SocketApi, what: str) -> None:
    """And nothing after them is taken for another request."""
    headers = f"{HOST}Authorization: Bearer {ADMIN_TOKEN}\r\nContent-Type: application/json\r\n{SMUGGLED[what]}"
    with RawConnection(api.url) as connection:
        connection.send(f"POST /v1/federations HTTP/1.1\r\n{headers}GET /healthz HTTP/1.1\r\n{HOST}\r\n".encode())
        received = read_to_end(connection)
    assert statuses(received) == [400]
    assert json.loads(received.rpartition(b"\r\n\r\n")[2])["code"] == "invalid-http"


class TestGoodConnections:
    def test_keep_alive_requests_are_answered_in_turn(self, api: SocketApi) -> None:
        with RawConnection(api.url) as connection:
            for _ in range(3):
                connection.send_head("GET", "/healthz")
                assert connection.answer()[0] == 200

    def test_pipelined_requests_are_answered(self, api: SocketApi) -> None:
        with RawConnection(api.url) as connection:
            last = f"GET /healthz HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n"
            connection.send((f"GET /healthz HTTP/1.1\r\n{HOST}\r\n" * 3 + last).encode())
            assert statuses(read_to_end(connection)) == [200] * 4

    def test_http_1_0_is_answered(self, api: SocketApi) -> None:
        with RawConnection(api.url) as connection:
            connection.send(b"GET /healthz HTTP/1.0\r\n\r\n")
            received = read_to_end(connection)
        assert statuses(received) == [200]
        assert b"connection: close" in received.lower()

    def test_expect_100_continue_is_answered(self, api: SocketApi) -> None:
        with RawConnection(api.url) as connection:
            authorization = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content_Type": "application/json"}
            connection.send_head("POST", "/v1/federations", **authorization, Content_Length=2, Expect="100-continue")
            assert connection.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.send(b"{}")
            assert connection.answer()[0] == 422

    def test_head_and_body_arrive_together(self, api: SocketApi) -> None:
        with RawConnection(api.url) as connection:
            for _ in range(3):
                connection.send_head("GET", "/healthz")
                head, _, body = connection.socket.recv(65536).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                assert json.loads(body)["status"] == "ok"

    def test_a_head_does_not_wait_for_its_body(self) -> None:
        go_on = threading.Event()

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await asyncio.to_thread(go_on.wait, 30)
            await send({"type": "http.response.body", "body": b"body"})

        with serving(app) as url, RawConnection(url) as connection:
            connection.send_head("GET", "/slow")
            assert connection.socket.recv(65536).endswith(b"\r\n\r\n")
            go_on.set()
            assert connection.socket.recv(65536) == b"body"

    def test_a_head_without_its_body_is_sent_before_the_connection_closes(self) -> None:
        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})

        with serving(app) as url, RawConnection(url) as connection:
            connection.send_head("GET", "/broken")
            assert statuses(read_to_end(connection)) == [200]

    def test_a_response_reaches_a_client_that_is_still_sending(self, api: SocketApi) -> None:
        """Closing a connection with unread bytes resets it, which may destroy the response."""
        body = b"x" * (2 * MIB)
        with RawConnection(api.url) as connection:
            connection.send_head("PUT", "/v1/rounds/1/update", Content_Length=2 * len(body))
            connection.send(body)
            assert connection.answer()[0] == 401


async def wait_until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture(params=["http", "https"])
def scheme_options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    if request.param == "http":
        yield {}
        return
    with trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.tempfile() as chain:
        yield {"ssl_certfile": chain}


def say_hello(connection: RawConnection) -> None:
    """Start TLS without checking the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection.socket = context.wrap_socket(connection.socket)


class TestUnreadResponses:
    def test_unread_downloads_are_dropped_and_use_little_memory(self, scheme_options: dict[str, Any]) -> None:
        sent = 0

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            is_gone = asyncio.create_task(wait_until_gone(receive))
            headers = [(b"content-length", str(4 * BUFFERS).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while sent < 4 * BUFFERS and not is_gone.done():
                await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
                sent += MIB
                await asyncio.sleep(0)  # let others run

        with serving(app, **scheme_options) as url, RawConnection(url) as connection:
            if scheme_options:
                say_hello(connection)
            connection.send_head("GET", "/model")
            assert is_ended(connection, within_s=30)
        assert sent < BUFFERS

    def test_an_unread_short_response_does_not_keep_a_closing_connection(self) -> None:
        """The server waits for what the kernel cannot buffer, but not for long."""

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            headers = [(b"content-length", str(BUFFERS).encode()), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": bytes(BUFFERS)})

        with serving(app) as url, RawConnection(url) as connection:
            connection.send_head("GET", "/model")
            assert is_ended(connection, within_s=30)

    def test_a_slow_reader_gets_everything(self) -> None:
        """Only time without progress counts, not the total."""
        length = 2 * BUFFERS

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            headers = [(b"content-length", str(length).encode()), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": bytes(length)})

        with serving(app) as url, RawConnection(url) as connection:
            connection.send_head("GET", "/model")
            received = 0
            while data := connection.socket.recv(MIB):
                received += len(data)
                select.select([], [], [], 0.005)  # a slow link
        assert received > length
