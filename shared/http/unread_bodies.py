"""What happens to the rest of a request that was answered before it was read."""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_BYTES = 4 * 1024 * 1024


class UnreadBodies:
    """ASGI middleware: an answer that leaves a part of the request's body unread ends the connection.

    What still comes is ignored for a while, within limits: a connection that is closed while its peer sends is reset,
    and the reset can destroy the answer before the peer has read it.
    """

    def __init__(self, app: ASGIApp, linger_s: float) -> None:
        self._app, self._linger_s = app, linger_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        is_read, closes = False, False

        async def noting() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)  # also when the peer is gone
            return message

        async def ignore_rest() -> None:
            ignored = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(self._linger_s):
                    while not is_read and ignored < LINGER_BYTES:
                        ignored += len((await noting()).get("body", b""))

        async def closing(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start" and not is_read:
                closes = True
                headers = [header for header in message.get("headers", []) if header[0].lower() != b"connection"]
                message["headers"] = [*headers, (b"connection", b"close")]
            elif closes and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await ignore_rest()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, noting, closing)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in scope["headers"]
    )
