"""JSON bodies are small; uploads have their own limit, from the plan."""

import re
from contextlib import suppress
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import problem

_UPLOAD = re.compile(r"^/v1/rounds/\d+/update$")


class _TooLong(Exception):
    pass


class BodyLimit:
    """ASGI middleware: 413 for a body over the limit, by its Content-Length or, without one, as it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or _UPLOAD.match(scope["path"]):
            await self._app(scope, receive, send)
            return
        received = 0
        started = refused = False
        length = dict(scope["headers"]).get(b"content-length", b"0")

        async def limited() -> Message:
            nonlocal received, refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                refused = True
                raise _TooLong
            return message

        async def noting(message: Message) -> None:
            nonlocal started
            if refused and not started:
                return  # FastAPI makes its own answer of what `limited` raises; ours takes its place
            started = True
            await send(message)

        if length.isdigit() and int(length) > self._max_bytes:
            refused = True
        else:
            with suppress(_TooLong):
                await self._app(scope, limited, noting)
        if refused and not started:
            answer = problem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", f"The body may have at most {self._max_bytes} bytes."
            )
            await answer(scope, receive, send)
