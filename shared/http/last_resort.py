"""The answer to errors that nobody expected."""

import logging
from http import HTTPStatus

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
