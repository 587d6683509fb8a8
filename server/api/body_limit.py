"""JSON bodies are small and soon there; uploads have their own limits, from the plan."""

import asyncio
from contextlib import suppress
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.proxies import route_path
from server.api.request_limits import UPLOAD
from shared.http.problems import problem


class _Refused(Exception):
    pass


class BodyLimit:
    """ASGI middleware: 413 for a body over the limit, by its Content-Length or as it arrives; 408 for a slow one."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_s: float) -> None:
        self._app, self._max_bytes, self._max_s = app, max_bytes, max_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or UPLOAD.fullmatch(route_path(scope)):
            await self._app(scope, receive, send)
            return
        received, more, started = 0, True, False
        refusal: JSONResponse | None = None
        length = dict(scope["headers"]).get(b"content-length", b"0")
        clock = asyncio.get_running_loop().time
        late_at = clock() + self._max_s

        async def limited() -> Message:
            nonlocal received, more, refusal
            if not more:  # only the end of the connection is left to wait for
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), late_at - clock())
            except TimeoutError:
                refusal = self._too_slow()
                raise _Refused from None
            more = message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                refusal = self._too_large()
                raise _Refused
            return message

        async def noting(message: Message) -> None:
            nonlocal started
            if refusal is not None and not started:
                return  # FastAPI makes its own answer of what `limited` raises; ours takes its place
            started = True
            await send(message)

        if length.isdigit() and int(length) > self._max_bytes:
            refusal = self._too_large()
        else:
            with suppress(_Refused):
                await self._app(scope, limited, noting)
        if refusal is not None and not started:
            await refusal(scope, receive, send)

    def _too_large(self) -> JSONResponse:
        return problem(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", f"The body may have at most {self._max_bytes} bytes."
        )

    def _too_slow(self) -> JSONResponse:
        return problem(
            HTTPStatus.REQUEST_TIMEOUT,
            "body-too-slow",
            f"The body did not come within {self._max_s:g} s.",
            next_step="Send it again.",
            headers={"Connection": "close"},
        )
