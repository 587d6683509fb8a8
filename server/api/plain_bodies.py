"""Bodies come as they are: a compressed one could unpack to far more than any limit allows."""

from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from shared.http.problems import problem


class PlainBodies:
    """ASGI middleware: 415 for a body with a Content-Encoding."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding in ("", "identity"):
            await self._app(scope, receive, send)
            return
        refusal = problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "encoded-body",
            "Bodies must not be compressed or otherwise encoded.",
            next_step="Send the body as it is, without Content-Encoding.",
            headers={"Accept-Encoding": "identity"},
        )
        await refusal(scope, receive, send)
