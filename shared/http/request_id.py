"""Every request has an id: in the answer, in each log line that it causes, in each problem."""

import logging
import re
import time
import uuid
from contextvars import ContextVar
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_current: ContextVar[str | None] = ContextVar("request_id", default=None)
_acceptable = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


def current_request_id() -> str | None:
    """The id of the request that this code runs for."""
    return _current.get()


class RequestIdFilter(logging.Filter):
    """Puts the id on log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Never drops one."""
        record.request_id = _current.get() or "-"
        return True


class RequestIds:
    """ASGI middleware: takes the caller's X-Request-ID if it is a sane one, else makes one; logs the request."""

    def __init__(self, app: ASGIApp, log: str = "server.access") -> None:
        self._app, self._log = app, logging.getLogger(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _acceptable.match(given) else uuid.uuid4().hex[:16]
        token, status, started = _current.set(request_id), 0, time.perf_counter()
        path = quote(scope["path"])  # a line break in it must not make a line of its own in the log

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._log.info(
                "%s %s %s",
                scope["method"],
                path,
                status,
                extra={
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "duration_ms": round((time.perf_counter() - started) * 1000, 1),
                    "client_address": (scope.get("client") or ("",))[0],
                },
            )
            _current.reset(token)
