"""The agent's HTTP connection to its coordinator, and to no other server."""

from collections.abc import Callable

import httpx

from client_agent.errors import ForeignUrl
from shared.contract import versions
from shared.http.client import open_client
from shared.http.client_connection import Connection

LONG_POLL_S = 30.0
_READ_S = LONG_POLL_S + 30.0


def open_http(connection: Connection, token: str | Callable[[], str] = "") -> httpx.Client:
    """Open an HTTP client that speaks the agents' protocol; a callable token is called for each request."""
    headers = {versions.HEADER: str(versions.PROTOCOL)}
    return open_client(connection, token, program="distrans-agent", read_s=_READ_S, headers=headers)


def require_same_origin(http: httpx.Client, url: str) -> httpx.URL:
    """Return the parsed URL; raise ForeignUrl if it is not on the coordinator, since requests carry the token."""
    base = http.base_url
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ForeignUrl(f"The coordinator named {url[:200]!r}, which is not a valid URL.") from error
    is_path = url.startswith("/") and not target.scheme and not target.host
    is_own = (target.scheme, target.host, target.port) == (base.scheme, base.host, base.port) and not target.userinfo
    if not is_path and not is_own:
        raise ForeignUrl(
            f"The coordinator named {url[:200]!r}, which is not on {base.scheme}://{base.netloc.decode()}."
        )
    return target
