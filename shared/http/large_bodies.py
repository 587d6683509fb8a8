"""Large bodies that go around h11, which copies each byte several times on its way in and out.

h11 still reads every head, and whatever is not framed by a plain Content-Length. Once it has read the head of a request
whose body does not arrive with it, this takes the rest of that body as it comes, in the pieces that the socket returns.
An application can also have it received into buffers of its own, by `scope["extensions"][RECEIVE_BODY]`. For a
response, `scope["extensions"][SEND_BODY]` sends a whole body without cutting it into messages.
"""

import asyncio
import os
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

# async (memoryview, seconds) -> int: fill the buffer, or as much of it as arrives in time, and return how much that is.
# Only there if the body goes around h11. Raises ConnectionResetError if the connection broke. Whatever is not received
# in this way arrives as messages.
RECEIVE_BODY = "distrans.receive_body"
SEND_BODY = "distrans.send_body"  # async (memoryview) -> None; then end the response with an empty last message
_TURN_BYTES = 1024 * 1024  # handed to the kernel before others get their turn
_WAITING_BYTES = 64 * 1024  # kept in memory while the peer does not read


class LargeBodies(H11Protocol):
    """uvicorn's protocol, with a shortcut for large bodies in both directions."""

    body_left = 0  # bytes of the current request's body that h11 will not see

    @override
    def data_received(self, data: bytes) -> None:
        if not self.body_left:
            super().data_received(data)
            return
        self._unset_keepalive_if_required()
        rest = b""
        if len(data) > self.body_left:  # a pipelined request
            data, rest = data[: self.body_left], data[self.body_left :]
        self.body_left -= len(data)
        cycle: Any = self.cycle
        if not cycle.response_complete:
            cycle.body = data if not cycle.body else bytes(cycle.body) + data  # the first piece is not copied
            cycle.more_body = bool(self.body_left)
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()
        if rest:
            super().data_received(rest)

    @override
    def handle_events(self) -> None:
        known = self.cycle
        super().handle_events()
        if self.cycle is not known and self.cycle is not None and not self.cycle.response_complete:
            scope: Any = self.scope  # uvicorn's type knows no extensions but its own
            scope.setdefault("extensions", {})[SEND_BODY] = self._send_body
            self._take_over()

    def _take_over(self) -> None:
        """Receive the rest of the body here if that is large, and tell h11 that the request has ended."""
        if self.conn.their_state is not h11.SEND_BODY or self.cycle.waiting_for_100_continue:
            return
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if self.scope["http_version"] != "1.1" or b"transfer-encoding" in headers or not length.isdigit():
            return
        left = int(length) - len(self.cycle.body)
        if left <= HIGH_WATER_LIMIT or self.conn.trailing_data[0]:
            return
        head = [b"PUT / HTTP/1.1", b"host: -", b"connection: " + headers.get(b"connection", b"keep-alive"), b"", b""]
        self.conn = self.cycle.conn = self.new_connection()
        self.conn.receive_data(b"\r\n".join(head))
        while self.conn.next_event() not in (h11.NEED_DATA, h11.PAUSED):
            pass
        self.body_left = left
        scope: Any = self.scope
        scope["extensions"][RECEIVE_BODY] = self._receive_body

    def new_connection(self) -> h11.Connection:
        """Return the state of a connection on which nothing has been received."""
        return h11.Connection(h11.SERVER, self.config.h11_max_incomplete_event_size or 64 * 1024)

    def flush_head(self) -> None:
        """Send what a subclass holds back of the response so far."""

    async def _receive_body(self, buffer: memoryview, seconds: float) -> int:
        cycle: Any = self.cycle
        first = min(len(buffer), len(cycle.body))  # what arrived before
        buffer[:first] = cycle.body[:first]
        cycle.body = bytes(cycle.body[first:])
        target = buffer[first : first + self.body_left]
        if not target or cycle.body or cycle.disconnected:
            return self._received(first)
        filling = _Filling(self, target)
        timer = self.loop.call_later(seconds, filling.end)
        self.transport.set_protocol(filling)
        self.flow.resume_reading()
        try:
            await filling.ended
        finally:
            timer.cancel()
            if not self.transport.is_closing():
                self.flow.pause_reading()
                self.transport.set_protocol(self)
        return self._received(first + filling.size_bytes)

    def _received(self, count: int) -> int:
        if not count and self.body_left and self.cycle is not None and self.cycle.disconnected:
            raise ConnectionResetError("the peer hung up before the end of the body")
        return count

    def body_received(self, count: int) -> None:
        """Note that some bytes of a body went into a buffer of the application."""
        self._unset_keepalive_if_required()
        self.body_left -= count
        if not self.body_left and self.cycle is not None:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    async def _send_body(self, body: memoryview) -> None:
        """Send a whole body after the response's head, with at most a few bytes of it in a buffer of ours."""
        cycle = self.cycle
        if cycle.disconnected:
            return
        self.flush_head()
        self.conn.send_with_data_passthrough(h11.Data(data=body))  # type: ignore[arg-type]  # only counts the bytes
        socket = None if self.transport.get_extra_info("ssl_object") else self.transport.get_extra_info("socket")
        while body:
            if self.flow.write_paused:
                await self.flow.drain()
            if cycle.disconnected or self.transport.is_closing():
                return
            sent = 0
            if socket is not None and not self.transport.get_write_buffer_size():
                sent = _write(socket.fileno(), body[:_TURN_BYTES])
            if not sent:  # the transport waits until the peer reads again, and notices when the connection breaks
                sent = min(len(body), _WAITING_BYTES)
                self.transport.write(body[:sent])
            body = body[sent:]
            if not self.flow.write_paused:
                await asyncio.sleep(0)


class _Filling(asyncio.BufferedProtocol):
    """Receives into one buffer on behalf of a connection."""

    def __init__(self, connection: LargeBodies, target: memoryview) -> None:
        self._connection, self._target = connection, target
        self.size_bytes = 0
        self.ended: asyncio.Future[None] = connection.loop.create_future()

    def end(self) -> None:
        """End it: the buffer is full, the connection broken, or the time over."""
        if not self.ended.done():
            self.ended.set_result(None)

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self.size_bytes :]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self.size_bytes += nbytes
        self._connection.body_received(nbytes)
        if self.size_bytes == len(self._target):
            self._connection.flow.pause_reading()  # at once: there is no room for more
            self.end()

    @override
    def eof_received(self) -> None:
        self._connection.eof_received()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.end()
        self._connection.connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        self._connection.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._connection.resume_writing()


def _write(descriptor: int, data: memoryview) -> int:
    """Return how many bytes the kernel took; 0 if it takes none now, or no more."""
    try:
        return os.write(descriptor, data)
    except OSError:
        return 0
