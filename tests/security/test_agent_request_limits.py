"""Attacks on the agent's web service with slow, large or many requests."""

import base64
import io
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import torch
import trustme
from PIL import Image
from support.agent_service import PLAN, image, serving
from support.api import problem_of
from support.tls import write_certificate
from support.web_agents import MIB, WebAgent, last_answer, web_agent


@pytest.fixture(scope="module")
def plain() -> Iterator[WebAgent]:
    """An agent with default options."""
    with web_agent() as one:
        yield one


class TestBodies:
    def test_a_body_that_never_ends_is_cut_off(self) -> None:
        with web_agent(body_s=0.2) as one:
            stalled = [
                one.raw(*one.head("image/png", 1000), body=b"x"),
                one.raw(*one.head("multipart/form-data; boundary=x", 1000), body=b"--x\r\n"),
                one.raw(*one.head("application/json", 1000)),
            ]
            for connection in stalled:
                status, answer = last_answer(connection)
                assert (status, answer["code"]) == (408, "body-too-slow")
            assert one.ask("/predict").status_code == 200

    def test_slow_large_bodies_neither_fill_the_memory_nor_lock_out_others(self) -> None:
        """Twelve callers send three quarters of 1 MiB and stop; the agent may hold 2 MiB."""
        with (
            web_agent(max_body_bytes=MIB, max_held_bytes=2 * MIB, body_s=600) as one,
            selectors.DefaultSelector() as ready,
        ):
            part = bytes(MIB * 3 // 4)
            for _ in range(12):
                connection = one.raw(*one.head("image/png", MIB), body=part)
                ready.register(connection, selectors.EVENT_READ)
            dropped = 0
            while dropped < 10:  # only two of them fit
                for key, _ in ready.select(60) or pytest.fail("bodies over the limit are still in memory"):
                    assert isinstance(key.fileobj, socket.socket)
                    ready.unregister(key.fileobj)
                    status, answer = last_answer(key.fileobj)
                    assert (status, answer["code"]) == (503, "busy")
                    dropped += 1
            for _ in range(3):
                assert one.ask("/predict").status_code == 200
            left = [key.fileobj for key in ready.get_map().values()]
            assert len(left) == 2
            for connection in left:
                assert isinstance(connection, socket.socket)
                connection.close()

    def test_memory_is_released_however_a_request_ends(self) -> None:
        """Only one body fits at a time; if a byte were not released, the last one would be refused."""
        length = 64 * 1024
        with web_agent(max_body_bytes=length, max_held_bytes=length) as one:
            for _ in range(3):
                one.raw(*one.head("image/png", length), body=bytes(1000)).close()  # hung up
                over = one.raw("POST /predict HTTP/1.1", "Host: 127.0.0.1", "Content-Type: image/png",
                               "Transfer-Encoding: chunked", body=b"10001\r\n" + bytes(length + 1))  # fmt: skip
                assert last_answer(over)[0] == 413
                assert one.predict(b"no image").status_code == 400
                assert one.predict(bytes(length)).status_code == 400
                assert one.ask("/predict").status_code == 200

    def test_bodies_of_callers_without_the_token_are_not_read(self) -> None:
        """With Expect: 100-continue a caller sees whether its body is wanted."""
        with web_agent(token="let-me-in") as one:
            for token in ([], ["Authorization: Bearer wrong"], ["Authorization: Basic bGV0LW1lLWlu"]):
                status, answer = last_answer(one.raw(*one.head("image/png", MIB, "Expect: 100-continue", *token)))
                assert (status, answer["code"]) == (401, "invalid-token")

    def test_no_body_is_read_while_the_queue_is_full(self) -> None:
        entered, release = threading.Event(), threading.Event()

        def slow(images: torch.Tensor) -> torch.Tensor:
            entered.set()
            release.wait(60)
            return torch.zeros(len(images), len(PLAN.classes))

        with web_agent(queue=1) as one:
            one.queue.model = serving(slow)
            first = one.queue.submit(lambda: torch.zeros(1, 1, 16, 16))
            assert entered.wait(60)
            status, answer = last_answer(one.raw(*one.head("image/png", MIB, "Expect: 100-continue")))
            assert (status, answer["code"]) == (429, "queue-full")
            release.set()
            first.result(60)
            assert one.ask("/predict").status_code == 200

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (["POST /nothing HTTP/1.1"], 404),
            (["GET /info HTTP/1.1"], 200),
            (["PUT /predict HTTP/1.1"], 405),
            (["POST /predict?top_k=0 HTTP/1.1", "Content-Type: image/png"], 422),
            (["POST /predict HTTP/1.1", "Content-Type: text/html"], 415),
            (["POST /predict HTTP/1.1", "Content-Type: image/png", "Origin: null"], 403),
        ],
    )
    def test_an_unread_body_ends_the_connection(self, plain: WebAgent, lines: list[str], expected: int) -> None:
        for length in ("Content-Length: 100000", "Transfer-Encoding: chunked"):
            assert last_answer(plain.raw(*lines, "Host: 127.0.0.1", length))[0] == expected


def test_one_address_cannot_occupy_all_connections() -> None:
    with web_agent(max_connections=8) as one, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(one.connect()).sendall(b"GET /in")
        with one.connect() as fifth, suppress(ConnectionError):
            assert fifth.recv(100) == b""
        with pytest.raises(httpx.TransportError):
            one.ask("/info")
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=elsewhere, base_url=one.http.base_url) as other:
            assert other.get("/info").status_code == 200


def test_connections_that_never_finish_their_tls_handshake_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = write_certificate(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
    with web_agent(tls=tls, max_connections=8) as one, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(one.connect())
        with one.connect() as fifth, suppress(ConnectionError):
            assert fifth.recv(100) == b""
        assert "refused a connection from 127.0.0.1: 4 connections from it are open" in caplog.text
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2", verify=False)
        with httpx.Client(transport=elsewhere, base_url=one.http.base_url) as other:
            assert other.get("/info").status_code == 200


def test_silent_tls_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.http.listener._TLS_HANDSHAKE_S", 0.1)
    tls = write_certificate(trustme.CA().issue_cert("127.0.0.1"), tmp_path)
    with web_agent(tls=tls) as one, one.connect() as silent, suppress(ConnectionError):
        assert silent.recv(100) == b""


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header claims many pixels and whose pixels cannot be decoded."""
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    start = data.index(b"IDAT") + 4
    data[start : start + 20] = bytes(20)
    return bytes(data)


class TestImages:
    def test_pixels_are_counted_before_any_is_decoded(self, plain: WebAgent) -> None:
        files = [("images", (f"{n}.png", bomb(2000, 1000))) for n in range(26)]
        answer = plain.http.post("/predict", files=files)
        assert problem_of(answer) == (413, "too-many-pixels")
        assert "26 images have 52000000 pixels" in answer.json()["detail"]
        assert "50000000" in answer.json()["detail"]
        texts = [base64.b64encode(data).decode() for _, (_, data) in files]
        assert plain.http.post("/predict", json={"images": texts}).json()["detail"] == answer.json()["detail"]
        assert plain.http.post("/predict", files=files[:25]).status_code == 400  # few enough to decode

    def test_images_are_counted_before_any_is_decoded(self, plain: WebAgent) -> None:
        for count in (33, 100_000):
            answer = plain.http.post("/predict", json={"images": ["?"] * count})
            assert problem_of(answer) == (422, "image-count")

    def test_a_form_is_refused_at_the_first_file_over_the_limit(self, plain: WebAgent) -> None:
        part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\nx\r\n'
        connection = plain.raw(*plain.head("multipart/form-data; boundary=x", MIB), body=part * 33)
        status, answer = last_answer(connection)
        assert (status, answer["code"]) == (422, "image-count")

    def test_uploaded_images_are_never_written_to_disk(
        self, plain: WebAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Starlette would write files over 1 MB to the temporary folder, which does not exist here."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        large = image(size=(1200, 1200))
        assert len(large) > MIB
        assert plain.http.post("/predict", files={"images": large}).status_code == 200
