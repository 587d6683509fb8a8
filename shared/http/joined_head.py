"""Fewer packets per response."""

import asyncio


class JoinedHead:
    """A connection's transport that sends the head of a response together with the first piece of its body.

    Otherwise they would be two packets, with a turn of the event loop in between: the transport pauses us as soon as
    anything is unsent. A head without a body is sent at the end of the current turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""
        self._has_begun = False

    def write(self, data: bytes) -> None:
        """Send data; hold back the first piece."""
        if not self._has_begun:
            self._held, self._has_begun = data, True
            self._loop.call_soon(self.flush)
            return
        if not self._held:
            self._transport.write(data)
            return
        held, self._held = self._held, b""
        self._transport.writelines([held, data])

    def flush(self) -> None:
        """Send what is held back."""
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def is_closing(self) -> bool:
        """Return whether the connection is closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Send what was held back, then close the connection."""
        self.flush()
        self._transport.close()
