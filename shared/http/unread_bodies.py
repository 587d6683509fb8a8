"""What happens to a request's body that nobody reads."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CloseUnread:
    """ASGI middleware: a response that leaves the body unread ends the connection, and the sending of the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or not _announces_body(scope):
            await self._app(scope, receive, send)
            return
        unread = True

        async def noting() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def closing(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        await self._app(scope, noting, closing)


def _announces_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )
