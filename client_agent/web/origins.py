"""Host and Origin checks: programs and the service's own pages may call it, other web pages may not."""

import re
from collections.abc import Iterable
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.http.client_connection import is_loopback
from shared.http.problems import problem

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(?::[0-9]*)?")
_ORIGIN = re.compile(r"(https?)://([^/@\s]+)")
_SHOWN = 100  # characters of a caller's header to repeat in an answer


class HostAndOriginCheck:
    """ASGI middleware that refuses requests for another host and requests from other sites' pages.

    A page can point its own name at this machine (DNS rebinding) and then read every answer as its own, but the
    browser still sends that name as the host. Any page can send requests without reading the answers; the browser
    then sends the page's origin.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(_plain(host) for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        given: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"origin", b"sec-fetch-site"):
                # Repeated headers are joined into one that nothing below accepts: servers disagree on which one counts.
                given[name] = f"{given[name]}, {value.decode('latin-1')}" if name in given else value.decode("latin-1")
        host, origin = given.get(b"host", "").lower(), given.get(b"origin")
        if not self._serves(host, scope):
            return _foreign_host(host)
        if origin is not None and not self._is_own(origin.lower(), host, scope):
            return _foreign_origin(f"from {origin[:_SHOWN]!r}")
        if given.get(b"sec-fetch-site") == "cross-site":
            return _foreign_origin("from another site")
        return None

    def _serves(self, host: str, scope: Scope) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _plain(match[1])
        # The connection's local address, for `--host 0.0.0.0`; unlike a name, it cannot be redirected.
        return name in self._hosts or is_loopback(name) or name == (scope.get("server") or ("",))[0]

    def _is_own(self, origin: str, host: str, scope: Scope) -> bool:
        match = _ORIGIN.fullmatch(origin)
        if match is None:  # also "null", the origin of files and sandboxed frames
            return False
        scheme, place = match.groups()
        if scope["scheme"] == "https" and scheme == "http":
            return False
        return place == host or place in self._hosts  # the latter behind a proxy that does not forward the host


def _plain(host: str) -> str:
    return host.strip("[]").lower().removesuffix(".")


def _foreign_host(host: str) -> JSONResponse:
    return problem(
        HTTPStatus.MISDIRECTED_REQUEST,
        "unknown-host",
        f"This agent does not answer for the host {host[:_SHOWN]!r}.",
        next_step="Call it by its address, or allow the host with distrans-agent run --allowed-host HOST.",
    )


def _foreign_origin(source: str) -> JSONResponse:
    return problem(
        HTTPStatus.FORBIDDEN,
        "foreign-origin",
        f"This agent does not answer requests {source} in a browser.",
        next_step="Let the page's server call the agent, or open the agent's address directly.",
    )
