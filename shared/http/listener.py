"""A listening socket that limits open connections, in total and per address."""

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from shared.contract.errors import DistransError
from shared.http.addresses import address_key, is_within

logger = logging.getLogger(__name__)
_BACKLOG = 2048
_REPORT_EVERY_S = 10.0
_TLS_HANDSHAKE_S = 10.0
_TLS_SHUTDOWN_S = 2.0


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen. Connections queue up from here on, even while the application is still starting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::" and socket.has_dualstack_ipv6()  # accepts IPv4 too
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_any)
    except OSError as error:
        cause = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise DistransError(
            f"Cannot listen on {host}:{port}: {cause}.",
            next_step="Stop the program that uses the port, or choose another one with --port.",
        ) from error
    listening.set_inheritable(True)  # worker processes accept from it
    # Accepted sockets inherit it. asyncio sets it only on sockets created with an explicit protocol, unlike these, and
    # without it every response waits 40 ms for the peer's delayed acknowledgment of its headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Listener(socket.socket):
    """A socket that closes connections over a limit as soon as it accepts them. A limit of 0 means no limit.

    It counts descriptors, not requests: a connection that never finishes its TLS handshake uses one too.
    """

    def __init__(self, listening: socket.socket, *, total: int, per_address: int, exempt: Sequence[str] = ()) -> None:
        """Take over from a listening socket, which stays open. Networks in `exempt` have no limit per address."""
        super().__init__(listening.family, listening.type, listening.proto, os.dup(listening.fileno()))
        self._total, self._per_address, self._exempt = total, per_address, exempt
        self._open: Counter[str] = Counter()
        self._open_in_total = 0
        self._report_after = 0.0

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection. Close one over a limit and raise ConnectionAbortedError, which servers ignore."""
        accepted, address = super().accept()
        host = str(address[0]) if isinstance(address, tuple) else ""
        key = address_key(host)
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
            return f"{self._total} connections are open, the limit per process"
        if self._per_address and self._open[key] >= self._per_address and not is_within(host, self._exempt):
            return f"{self._per_address} connections from it are open, the limit per address"
        return None

    def _forget(self, key: str) -> None:
        self._open_in_total -= 1
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


class TlsLoop(asyncio.SelectorEventLoop):
    """asyncio's event loop, which a Listener needs, with short TLS timeouts for silent peers.

    By default asyncio waits 60 s for the handshake and 30 s for the closing message, which idle peers never send.
    """

    @override
    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options |= {"ssl_handshake_timeout": _TLS_HANDSHAKE_S, "ssl_shutdown_timeout": _TLS_SHUTDOWN_S}
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
