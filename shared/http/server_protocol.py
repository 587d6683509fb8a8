"""HTTP/1.1 connections that no peer can keep open forever, with the caller's certificate in the ASGI scope.

uvicorn's h11 protocol limits how much it buffers of a request's head, chunk headers and trailers; this adds deadlines.
At any time the peer must send a head, send the rest of a body, or read our response. Each has a limit, in seconds:

head_s    from the start of the connection, or the end of the last response, to the end of the next head
body_s    between two pieces of a body, while the application is ready for more
send_s    between two moments at which the peer reads part of a response
linger_s  from the response to a request that was not read in full until the connection is closed
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

from shared.http.joined_head import JoinedHead
from shared.http.large_bodies import LargeBodies
from shared.http.problems import problem
from shared.http.unread_bodies import LINGER_BYTES, UnreadBodies

CERTIFICATE = "distrans.client_certificate"  # scope key: the SHA-256 of the caller's certificate, in hexadecimal
ON_STOP = "distrans.on_stop"  # lifespan state key: called when the server stops, before it waits for responses
MAX_HEAD_BYTES = 32 * 1024  # applies to chunk headers and trailers, too
_NO_LINGER = struct.pack("ii", 1, 0)
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_FRAMING = {b"content-length", b"transfer-encoding"}


class _Connection(h11.Connection):
    """An h11 connection that also rejects large heads sent in one piece, and heads with two kinds of framing."""

    @override
    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            if len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers) > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("head too large", error_status_hint=431)
            if {name for name, _ in event.headers} >= _FRAMING:  # allows request smuggling
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            if absolute := _ABSOLUTE.match(event.target):  # sent by forward proxies; uvicorn takes it for a path
                path = b"/" + event.target[absolute.end() :].removeprefix(b"/")
                headers = event.headers.raw_items()
                return h11.Request(method=event.method, headers=headers, target=path, http_version=event.http_version)
        return event


class Protocol(LargeBodies):
    """uvicorn's protocol with small buffers and a deadline for everything the peer has to do."""

    head_s = 30.0
    body_s = 75.0  # applications that handle slow bodies themselves should give up earlier
    send_s = 30.0
    linger_s = 5.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = self.new_connection()
        self.app: Any = UnreadBodies(self.app, self.linger_s)
        self._certificate: str | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._awaits_head = False
        self._send_deadline: asyncio.TimerHandle | None = None
        self._discarded: int | None = None  # bytes ignored since the connection was refused; None before that

    @override
    def new_connection(self) -> h11.Connection:
        return _Connection(h11.SERVER, MAX_HEAD_BYTES)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        # Pause writing while anything is unsent: this keeps one piece of a response in memory, and `pause_writing`
        # tells us when to watch the peer. Not 0, because then asyncio's TLS never resumes.
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
            is_body = self.body_left > 0
            super().data_received(data)
            if is_body:
                self._await_peer()
            return
        self._discarded += len(data)
        if self._discarded > LINGER_BYTES:
            self._reset()

    @override
    def body_received(self, count: int) -> None:
        super().body_received(count)
        self._await_peer()

    @override
    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not isinstance(self.cycle.transport, JoinedHead):  # it has not run yet
            self.cycle.transport = JoinedHead(self.transport, self.loop)  # type: ignore[assignment]  # all it uses
        if self.scope is not None:
            self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]  # ours
        self._await_peer()

    @override
    def flush_head(self) -> None:
        if self.cycle is not None and isinstance(self.cycle.transport, JoinedHead):
            self.cycle.transport.flush()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_peer()

    @override
    def shutdown(self) -> None:
        if on_stop := self.app_state.get(ON_STOP):  # every connection calls it; it is idempotent
            on_stop()
        if self._is_idle():
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    @override
    def _should_upgrade(self) -> bool:
        return False  # spares the log uvicorn's two warnings per upgrade request

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # Deadlines for the peer

    def _await_peer(self) -> None:
        if self._discarded is not None or self.transport.is_closing():
            return
        if self._is_idle():
            if not self._awaits_head:  # sending a few bytes must not extend the deadline
                self._set_deadline(self.head_s, self._head_is_late)
                self._awaits_head = True
            return
        self._awaits_head = False
        if self.body_left or self.conn.their_state is h11.SEND_BODY:
            self._set_deadline(self.body_s, self._body_is_late)
        else:
            self._set_deadline(None)

    def _set_deadline(self, seconds: float | None, action: Callable[[], None] | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, action) if seconds is not None and action else None

    def _head_is_late(self) -> None:
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "head-too-slow", "The request's headers did not arrive in time.")
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
        """Abort the connection in the kernel, too, which would otherwise keep trying to send the rest."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    # Responses to input that never becomes a request

    @override
    def send_400_response(self, msg: str) -> None:
        error = sys.exception()  # the one uvicorn is handling
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            detail = f"The request's headers or trailers exceed {MAX_HEAD_BYTES} bytes."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head-too-large", detail)
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid-http", "The request is not valid HTTP/1.1.")

    def _refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        """Respond in place of the application, then discard input; closing at once could destroy the response."""
        self._unset_keepalive_if_required()
        if not self._is_idle():
            self.cycle.disconnected = True  # drop whatever the application still sends
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        response = problem(status, code, detail)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        if self.transport.can_write_eof():
            self._discarded = 0
            self.transport.write_eof()
            self._set_deadline(self.linger_s, self._reset)
        else:  # closing TLS has its own timeout
            self.transport.close()
