"""Requests through a reverse proxy: the caller's real address, its certificate, and the path prefix."""

import base64
import binascii
import hashlib
import re
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from shared.http.server_protocol import CERTIFICATE

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_MAX_CERTIFICATE_CHARACTERS = 16 * 1024


class Proxies:
    """ASGI middleware that applies the forwarding headers of trusted proxies and ignores everybody else's."""

    def __init__(
        self, app: ASGIApp, trusted: Sequence[str], certificate_header: str | None = None, root_path: str = ""
    ) -> None:
        self._app, self._root_path = app, root_path
        self._header = certificate_header.lower().encode() if certificate_header else None
        inner: Any = self._call  # uvicorn types its messages more narrowly than starlette
        self._forwarded: Any = ProxyHeadersMiddleware(inner, list(trusted))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        peer = scope.get("client")
        if self._header and peer and peer[0] in self._forwarded.trusted_hosts:
            values = [value for name, value in scope["headers"] if name == self._header]
            # With two headers, one may have been sent by the caller.
            scope[CERTIFICATE] = certificate_fingerprint(values[0].decode("latin-1")) if len(values) == 1 else None
        await self._forwarded(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with the prefix in the path, as ASGI requires; some proxies strip it."""
        if self._root_path:
            scope["root_path"] = self._root_path
            if not f"{scope['path']}/".startswith(f"{self._root_path}/"):
                scope["path"] = self._root_path + scope["path"]
                scope["raw_path"] = self._root_path.encode() + scope.get("raw_path", b"")
        await self._app(scope, receive, send)


def certificate_fingerprint(text: str) -> str | None:
    """Return the SHA-256 of a certificate in any form that proxies forward; None if it is empty or unknown.

    Forms: a fingerprint, percent-encoded PEM (nginx: $ssl_client_escaped_cert), base64 of DER (Caddy), or the same
    between colons (RFC 9440).
    """
    text = text.strip()
    if len(text) > _MAX_CERTIFICATE_CHARACTERS:
        return None
    if _FINGERPRINT.fullmatch(text.lower()):
        return text.lower()
    try:
        if "CERTIFICATE" in text:
            der = ssl.PEM_cert_to_DER_cert(unquote(text).strip())
        else:
            der = base64.b64decode(text.strip(":"), validate=True)
    except (ValueError, binascii.Error):
        return None
    return hashlib.sha256(der).hexdigest() if der else None
