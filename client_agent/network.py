"""The agent's way to its coordinator, and to no other server."""

from collections.abc import Callable

import httpx

from client_agent.errors import UnusableModel
from shared import versions
from shared.http.connection import Connection
from shared.http.outgoing import open_client

LONG_POLL_S = 30.0
_READ_S = LONG_POLL_S + 30.0


def open_http(connection: Connection, token: str | Callable[[], str] = "") -> httpx.Client:
    """An HTTP client that speaks the agents' protocol. A token may change while it is open."""
    headers = {versions.HEADER: str(versions.PROTOCOL)}
    return open_client(connection, token, program="distrans-agent", read_s=_READ_S, headers=headers)


def on_own_origin(http: httpx.Client, url: str) -> httpx.URL:
    """A URL that the coordinator named, which must be on the coordinator: the token goes nowhere else."""
    base = http.base_url
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise UnusableModel(f"The coordinator names {url[:200]!r}, which is not a valid URL.") from error
    is_path = url.startswith("/") and not target.scheme and not target.host
    is_own = (target.scheme, target.host, target.port) == (base.scheme, base.host, base.port) and not target.userinfo
    if not is_path and not is_own:
        raise UnusableModel(
            f"The coordinator names {url[:200]!r}, which is not on {base.scheme}://{base.netloc.decode()}."
        )
    return target
