"""The answer to errors that nobody expected."""

import asyncio
import logging
from http import HTTPStatus
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.http.problems import problem

logger = logging.getLogger(__name__)


class LastResort:
    """ASGI middleware: logs and answers an unexpected error while the request's id is still known."""

    def __init__(self, app: ASGIApp, program: str) -> None:
        self._app, self._program = app, program

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            logger.warning(
                "%s %s was cut off: the %s is stopping", scope["method"], quote(scope["path"]), self._program
            )
            if not started:
                await self._stopping()(scope, receive, send)
        except Exception:
            if started or scope["type"] != "http":
                raise
            logger.exception("an unexpected error")
            answer = problem(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "internal-error",
                f"The {self._program} met an unexpected error.",
                next_step="Tell the operator the request id; the log has the rest.",
            )
            await answer(scope, receive, send)

    def _stopping(self) -> Response:
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "stopping",
            f"The {self._program} is stopping and could not wait for this request.",
            next_step="Send it again when it is back.",
            headers={"Retry-After": "5"},
        )
