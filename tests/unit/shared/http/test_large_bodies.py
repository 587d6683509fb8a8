"""Bodies that go around h11 arrive like any other."""

import asyncio
import hashlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
import trustme
from support.sockets import RawConnection, read_to_end, serving
from support.tls import trusting, write_certificate

from shared.http.large_bodies import RECEIVE_BODY, SEND_BODY

LARGE = bytes(range(256)) * 1201 + b"rest"
HUGE = LARGE * 40  # more than the kernel buffers
PATIENCE_S = 60.0


class Echo:
    """Answers GET with a large body and PUT with what it received; `broken` has the uploads that broke off."""

    def __init__(self) -> None:
        self.broken: queue.Queue[int] = queue.Queue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await respond(send, len(HUGE))
            await scope["extensions"][SEND_BODY](memoryview(HUGE))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        options = parse_qs(scope["query_string"].decode())
        direct, found = bytearray(), hashlib.sha256()
        if receive_body := scope["extensions"].get(RECEIVE_BODY):
            buffer = memoryview(bytearray(int(options["buffer"][0])))
            most = int(options.get("most", [str(len(HUGE))])[0])
            try:
                while len(direct) < most and (count := await receive_body(buffer, PATIENCE_S)):
                    direct += buffer[:count]
            except ConnectionResetError:
                self.broken.put(len(direct))
                return
        found.update(direct)
        more = True
        while more:
            message = await receive()
            found.update(message.get("body", b""))
            more = message.get("more_body", False)
        answer = f"{found.hexdigest()} {len(direct)}".encode()
        await respond(send, len(answer))
        await send({"type": "http.response.body", "body": answer, "more_body": False})


async def respond(send: Any, length: int) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(length).encode())]})


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def url(echo: Echo) -> Iterator[str]:
    with serving(echo) as url:
        yield url


def expected(body: bytes, direct: int) -> str:
    return f"{hashlib.sha256(body).hexdigest()} {direct}"


@pytest.mark.parametrize("buffer", [10_007, 65_537, 1 << 20])
def test_a_large_body_arrives_whole_in_buffers_of_any_size(url: str, buffer: int) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        for _ in range(2):  # on one connection
            assert http.put(f"/?buffer={buffer}", content=HUGE).text == expected(HUGE, len(HUGE))


def test_what_is_not_received_into_buffers_arrives_as_messages(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        answer = http.put("/?buffer=1000&most=5000", content=HUGE)
        assert answer.text == expected(HUGE, 5000)
        assert http.put("/?buffer=1000", content=b"small").text == expected(b"small", 0)
        assert http.put("/?buffer=1000", content=iter([LARGE])).text == expected(LARGE, 0), "chunked"


def test_a_request_that_follows_at_once_is_answered_too(url: str) -> None:
    with RawConnection(url) as connection:
        connection.send_head("PUT", "/?buffer=70000", Content_Length=len(HUGE))
        connection.send(
            HUGE + b"PUT /?buffer=9 HTTP/1.1\r\nHost: it\r\nContent-Length: 5\r\nConnection: close\r\n\r\nsmall"
        )
        received = read_to_end(connection)
    for answer in (expected(HUGE, len(HUGE)), expected(b"small", 0)):
        assert received.count(answer.encode()) == 1


def test_a_connection_that_breaks_is_noticed(url: str, echo: Echo) -> None:
    with RawConnection(url) as connection:
        connection.send_head("PUT", "/?buffer=1000", Content_Length=len(LARGE))
        connection.send(LARGE[:100_000])
    assert echo.broken.get(timeout=PATIENCE_S) <= 100_000


def test_a_large_response_arrives_whole_however_slowly_it_is_read(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http, RawConnection(url) as slow:
        slow.send_head("GET", "/")
        for _ in range(2):
            assert http.get("/").content == HUGE, "others do not wait for it"
        assert slow.answer() == (200, HUGE)


def test_tls_makes_no_difference(echo: Echo, tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = write_certificate(authority.issue_cert("127.0.0.1"), tmp_path)
    with (
        serving(echo, **tls.options() | {"ssl_context_factory": None}) as url,
        httpx.Client(base_url=url, trust_env=False, verify=trusting(authority)) as http,
    ):
        assert http.put("/?buffer=65537", content=HUGE).text == expected(HUGE, len(HUGE))
        assert http.get("/").content == HUGE


def test_nothing_is_received_after_the_time_is_over() -> None:
    received: queue.Queue[int] = queue.Queue()

    async def impatient(scope: Any, _receive: Any, _send: Any) -> None:
        buffer = memoryview(bytearray(1000))
        while await scope["extensions"][RECEIVE_BODY](buffer, 0.01):
            pass
        received.put(0)
        await asyncio.Event().wait()

    with serving(impatient, timeout_graceful_shutdown=1) as url, RawConnection(url) as connection:
        connection.send_head("PUT", "/", Content_Length=len(LARGE))
        assert received.get(timeout=PATIENCE_S) == 0
