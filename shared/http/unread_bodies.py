"""Closes connections safely when the response is sent before the whole request body was read."""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_BYTES = 4 * 1024 * 1024


class UnreadBodies:
    """ASGI middleware: closes the connection after a response that leaves part of the request body unread.

    It first discards incoming data for a limited time: closing a connection while the peer is sending resets it, and
    the reset can destroy the response before the peer has read it.
    """

    def __init__(self, app: ASGIApp, linger_s: float) -> None:
        self._app, self._linger_s = app, linger_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        is_read, closes = False, False

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)  # true on disconnect, too
            return message

        async def discard_rest() -> None:
            discarded = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(self._linger_s):
                    while not is_read and discarded < LINGER_BYTES:
                        discarded += len((await receive_and_note()).get("body", b""))

        async def send_and_close(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start" and not is_read:
                closes = True
                headers = [header for header in message.get("headers", []) if header[0].lower() != b"connection"]
                message["headers"] = [*headers, (b"connection", b"close")]
            elif closes and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await discard_rest()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, receive_and_note, send_and_close)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in scope["headers"]
    )
