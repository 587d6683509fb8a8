"""A listening socket that bounds how many connections are open, in total and from one address."""

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override
from uvicorn import Config

from shared.http.addresses import as_counted, is_within
from shared.problems import DistransError

logger = logging.getLogger(__name__)
_REPORT_EVERY_S = 10.0
_TLS_HELLO_S = 10.0
_TLS_GOODBYE_S = 2.0


def listen(config: Config) -> socket.socket:
    """Bind and listen: from here on connections queue up, also while the application still starts."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    is_any = config.host == "::" and socket.has_dualstack_ipv6()  # IPv4 too
    try:
        listening = socket.create_server(
            (config.host, config.port), family=family, backlog=config.backlog, dualstack_ipv6=is_any
        )
    except OSError as error:
        cause = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise DistransError(
            f"Cannot listen on {config.host}:{config.port}: {cause}.",
            next_step="Is another program there? Try --port.",
        ) from error
    listening.set_inheritable(True)  # worker processes accept from it
    # Accepted sockets inherit it. asyncio sets it only on sockets that name their protocol, which these do not, and
    # without it every answer waits 40 ms for the peer's delayed acknowledgment of its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Listener(socket.socket):
    """Closes connections over a limit as soon as they are accepted. A limit of 0 means no limit.

    Descriptors are counted, not requests: a connection that never finishes its TLS handshake takes one too.
    """

    def __init__(self, listening: socket.socket, *, total: int, per_address: int, exempt: Sequence[str] = ()) -> None:
        """Listen in the place of a socket, which stays open. Networks in `exempt` have no limit per address."""
        super().__init__(listening.family, listening.type, listening.proto, os.dup(listening.fileno()))
        self._total, self._per_address, self._exempt = total, per_address, exempt
        self._open: Counter[str] = Counter()
        self._open_in_total = 0
        self._report_after = 0.0

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; one over a limit is closed and reported as aborted, which servers ignore."""
        accepted, address = super().accept()
        host = str(address[0]) if isinstance(address, tuple) else ""
        key = as_counted(host)
        if reason := self._refusal(host, key):
            if time.monotonic() >= self._report_after:
                self._report_after = time.monotonic() + _REPORT_EVERY_S
                logger.warning("refused a connection from %s: %s", host, reason)
            accepted.close()
            raise ConnectionAbortedError(reason)
        self._open[key] += 1
        self._open_in_total += 1
        return _Counted(accepted, lambda: self._forget(key)), address

    def _refusal(self, host: str, key: str) -> str | None:
        if self._total and self._open_in_total >= self._total:
            return f"{self._total} connections are open, the limit of this process"
        if self._per_address and self._open[key] >= self._per_address and not is_within(host, self._exempt):
            return f"{self._per_address} connections are open from there, the limit for one address"
        return None

    def _forget(self, key: str) -> None:
        self._open_in_total -= 1
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


class TlsLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop, which a Listener needs, for servers with TLS: it soon ends connections of silent peers.

    asyncio itself waits 60 s for the handshake and 30 s for the answer to the goodbye, which idle peers never send.
    """

    @override
    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options |= {"ssl_handshake_timeout": _TLS_HELLO_S, "ssl_shutdown_timeout": _TLS_GOODBYE_S}
        return await super().create_server(*arguments, **options)


class _Counted(socket.socket):
    def __init__(self, accepted: socket.socket, on_close: Callable[[], None]) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._on_close, self._is_counted = on_close, True

    @override
    def close(self) -> None:
        super().close()
        if self._is_counted:
            self._is_counted = False
            self._on_close()
