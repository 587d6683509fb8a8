"""HTTP connections with limits that uvicorn does not have, and with the caller's certificate in the scope."""

import asyncio
import hashlib
from http import HTTPStatus
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared.http.problems import problem

CERTIFICATE = "distrans.client_certificate"  # in the scope: the SHA-256 of the caller's certificate, in hexadecimal
MAX_HEAD_BYTES = 32 * 1024
HEAD_S = 30.0


class _HeadTooLarge(Exception):
    pass


class Protocol(HttpToolsProtocol):
    """The head of a request has to be small, and to come soon, also on a connection that was just opened."""

    head_s = HEAD_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head, self._head_bytes, self._head_too_large = False, 0, False
        self._timer: asyncio.TimerHandle | None = None
        self._certificate: str | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) if tls is not None else None
        self._certificate = hashlib.sha256(der).hexdigest() if der else None
        self._expect_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_large_head()

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]  # ours
        self._in_head, self._head_bytes = True, 0
        self._expect_head()

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._head_too_large = True
            raise _HeadTooLarge
        super().on_headers_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        if self._head_too_large:
            self._refuse_large_head()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid-http", "The request is not HTTP/1.1.")

    def _expect_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "head-too-slow", "The request's headers did not come in time.")
        else:
            self.transport.close()

    def _refuse_large_head(self) -> None:
        detail = f"The request line and headers may have at most {MAX_HEAD_BYTES} bytes."
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head-too-large", detail)

    def _refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        self._in_head = False
        answer = problem(status, code, detail)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()
