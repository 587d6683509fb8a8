"""Responses to unexpected errors and to requests cut off by a shutdown."""

import asyncio
import logging
from http import HTTPStatus
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.http.problems import problem

logger = logging.getLogger(__name__)


class UnexpectedErrors:
    """ASGI middleware: logs unexpected errors and responds with a problem while the request id is still known."""

    def __init__(self, app: ASGIApp, program: str) -> None:
        self._app, self._program = app, program

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
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
            logger.exception("unexpected error")
            response = problem(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "internal-error",
                f"The {self._program} ran into an unexpected error.",
                next_step="Report the request id to the operator, who will find the details in the log.",
            )
            await response(scope, receive, send)

    def _stopping(self) -> Response:
        return problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "stopping",
            f"The {self._program} is stopping and could not finish this request.",
            next_step="Send the request again once it is back.",
            headers={"Retry-After": "5"},
        )
