"""Security headers for every response of the coordinator and the agent."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Pages load files from their own service only: no inline scripts or styles, no frames, no other hosts.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
_ALWAYS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),  # responses contain tokens and names
]
_ON_HTTPS = (b"strict-transport-security", b"max-age=31536000")


class SecurityHeaders:
    """ASGI middleware: adds the security headers a response does not set itself, and the service's `own` headers."""

    def __init__(self, app: ASGIApp, own: dict[str, str] | None = None) -> None:
        self._app = app
        self._always = [*_ALWAYS, *((name.lower().encode(), value.encode()) for name, value in (own or {}).items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        wanted = [*self._always, _ON_HTTPS] if scope.get("scheme") == "https" else self._always

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message.get("headers", [])}
                added = [header for header in wanted if header[0] not in present]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        await self._app(scope, receive, send_with_headers)
