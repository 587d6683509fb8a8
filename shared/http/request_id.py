"""Request ids: one per request, in its response, in every log line it causes, and in every problem."""

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
    """Return the id of the request being handled, or None outside of one."""
    return _current.get()


class RequestIdFilter(logging.Filter):
    """Logging filter that adds the request id to every record and drops none."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Set `request_id` on the record."""
        record.request_id = _current.get() or "-"
        return True


class RequestIds:
    """ASGI middleware: accepts the caller's X-Request-ID if it is safe to log, else creates one; logs the request."""

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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._log.isEnabledFor(logging.INFO):
                self._note(scope, status, time.perf_counter() - started)
            _current.reset(token)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = quote(scope["path"])  # a line break in the path must not forge a log line
        self._log.info(
            "%s %s %s",
            scope["method"],
            path,
            status,
            extra={
                "method": scope["method"],
                "path": path,
                "status": status,
                "duration_ms": round(seconds * 1000, 1),
                "client_address": (scope.get("client") or ("",))[0],
            },
        )
