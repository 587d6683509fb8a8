"""HTTP/1.1 connections that end in every state, whatever the peer does, with the caller's certificate in the scope.

uvicorn's h11 protocol bounds what it buffers of a head, of a chunk's header and of trailers; this adds the deadlines.
A peer owes us either a head, the rest of a body, or room for our answer; each has a limit, in seconds:

head_s    from the opening of the connection, or the end of the last answer, to the end of the next head
body_s    between two pieces of a body, while the application is ready for more
send_s    between two moments at which the peer takes some bytes of an answer
linger_s  from an answer to a request that was not read in full until the connection is cut
"""

import asyncio
import hashlib
import re
import socket
import struct
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.http.problems import problem
from shared.http.unread_bodies import LINGER_BYTES, UnreadBodies

CERTIFICATE = "distrans.client_certificate"  # in the scope: the SHA-256 of the caller's certificate, in hexadecimal
ON_STOP = "distrans.on_stop"  # in the lifespan's state: called when the server stops, before it waits for answers
MAX_HEAD_BYTES = 32 * 1024  # also of a chunk's header, and of trailers
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER for no time
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_FRAMING = {b"content-length", b"transfer-encoding"}


class _Connection(h11.Connection):
    """Refuses heads that h11 lets pass: large ones that came in one piece, and those with two kinds of framing."""

    @override
    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            if len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers) > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("head too large", error_status_hint=431)
            if {name for name, _ in event.headers} >= _FRAMING:  # what request smuggling is made of
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            if absolute := _ABSOLUTE.match(event.target):  # as forward proxies send it; uvicorn takes it for a path
                path = b"/" + event.target[absolute.end() :].removeprefix(b"/")
                headers = event.headers.raw_items()
                return h11.Request(method=event.method, headers=headers, target=path, http_version=event.http_version)
        return event


class Protocol(H11Protocol):
    """uvicorn's protocol with a deadline for whatever the peer owes, and small buffers."""

    head_s = 30.0
    body_s = 75.0  # applications that answer slow bodies themselves should do it earlier
    send_s = 30.0
    linger_s = 5.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Connection(h11.SERVER, MAX_HEAD_BYTES)
        self.app: Any = UnreadBodies(self.app, self.linger_s)
        self._certificate: str | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._awaits_head = False
        self._send_deadline: asyncio.TimerHandle | None = None
        self._discarded: int | None = None  # bytes ignored since a refusal; None before one

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        # Writing is paused while anything is unsent: one piece of an answer in memory, and `pause_writing` tells when
        # to watch the peer. Not 0, with which asyncio's TLS pauses for good.
        transport.set_write_buffer_limits(high=1)
        tls = transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) if tls is not None else None
        self._certificate = hashlib.sha256(der).hexdigest() if der else None
        self._await_peer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._stop_watching_sends()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._discarded is None:
            super().data_received(data)
            return
        self._discarded += len(data)
        if self._discarded > LINGER_BYTES:
            self._reset()

    @override
    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]  # ours
        self._await_peer()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_peer()

    @override
    def shutdown(self) -> None:
        if on_stop := self.app_state.get(ON_STOP):  # connections are told one by one; the call has no effect twice
            on_stop()
        if self._is_idle():
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    @override
    def _should_upgrade(self) -> bool:
        return False  # without uvicorn's two warnings in the log for each request that asks

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # What the peer owes

    def _await_peer(self) -> None:
        if self._discarded is not None or self.transport.is_closing():
            return
        if self._is_idle():
            if not self._awaits_head:  # bytes that come in the meantime gain no time
                self._set_deadline(self.head_s, self._head_is_late)
                self._awaits_head = True
            return
        self._awaits_head = False
        if self.conn.their_state is h11.SEND_BODY:
            self._set_deadline(self.body_s, self._body_is_late)
        else:
            self._set_deadline(None)

    def _set_deadline(self, seconds: float | None, action: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, action) if seconds is not None and action else None

    def _head_is_late(self) -> None:
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "head-too-slow", "The request's headers did not come in time.")
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        if self.flow.read_paused:  # the application is slow, not the peer
            self._set_deadline(self.body_s, self._body_is_late)
        else:
            self.transport.close()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_send()

    @override
    def resume_writing(self) -> None:
        self._stop_watching_sends()
        super().resume_writing()

    def _watch_send(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._send_deadline = self.loop.call_later(self.send_s, self._check_send, unsent)

    def _check_send(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_send()
        else:
            self._reset()

    def _stop_watching_sends(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def _reset(self) -> None:
        """End the connection so that the kernel forgets it too; otherwise it would go on offering what is unsent."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    # Refusals of what never becomes a request

    @override
    def send_400_response(self, msg: str) -> None:
        error = sys.exception()  # the one that uvicorn is handling
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            detail = f"The request line and headers, or trailers, may have at most {MAX_HEAD_BYTES} bytes."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head-too-large", detail)
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid-http", "The request is not valid HTTP/1.1.")

    def _refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        """Answer in place of the application, then ignore what comes; closing at once could destroy the answer."""
        self._unset_keepalive_if_required()
        if not self._is_idle():
            self.cycle.disconnected = True  # nothing that it sends from now on gets out
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        answer = problem(status, code, detail)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        if self.transport.can_write_eof():
            self._discarded = 0
            self.transport.write_eof()
            self._set_deadline(self.linger_s, self._reset)
        else:  # TLS has a goodbye of its own, with a limit
            self.transport.close()
