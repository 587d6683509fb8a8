"""Runs the web application on its socket, in a thread."""

import asyncio
import logging
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from client_agent.settings import ServeOptions
from shared.http.addresses import address_key
from shared.http.listener import Listener, listen
from shared.http.server_protocol import Protocol

logger = logging.getLogger(__name__)
_STOP_WAIT_S = 30.0


@contextmanager
def web_server(app: FastAPI, options: ServeOptions, on_failure: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Serve in a thread with its own event loop, and yield the port; at the end, finish pending requests.

    `on_failure` is called if the service stops unexpectedly, which would leave the port unanswered.
    """
    options.check()
    limit = _connection_limit(options)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        **(options.tls.options() if options.tls else {}),
        http=partial(_Connection, limit=limit, counts=Counter()) if options.tls is None else Protocol,  # type: ignore[arg-type]  # called
        loop="auto" if options.tls is None else "shared.http.listener:TlsLoop",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing depends on the caller's address
        timeout_graceful_shutdown=5,
    )
    with (
        listen(options.host, options.port) as bound,
        bound if options.tls is None else Listener(bound, total=limit, per_address=max(1, limit // 2)) as listening,
    ):
        server = uvicorn.Server(config)
        thread = threading.Thread(target=_serve, args=(server, listening, on_failure), name="web", daemon=True)
        thread.start()
        port: int = listening.getsockname()[1]
        scheme, host = "https" if options.tls else "http", f"[{options.host}]" if ":" in options.host else options.host
        logger.info("serving /predict on %s://%s:%d", scheme, host, port)
        for risk in options.risks():
            logger.warning(risk)
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join(_STOP_WAIT_S)


def _serve(server: uvicorn.Server, listening: socket.socket, on_failure: Callable[[], None]) -> None:
    try:
        server.run(sockets=[listening])
    except BaseException:  # also uvicorn's SystemExit
        logger.critical("the web service failed", exc_info=True)
    if not server.should_exit:
        on_failure()


class _Connection(Protocol):
    """A protocol that closes connections over a limit; one address may have half of them.

    A Listener counts better, since connections get here only after their TLS handshake. But it works only with
    asyncio's event loop, and with uvloop a prediction takes a third less CPU time. So it is used only with TLS.
    """

    def __init__(self, *arguments: Any, limit: int, counts: Counter[str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limit, self._counts, self._address = limit, counts, ""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._address = address_key(self.client[0]) if self.client else ""
        self._counts[self._address] += 1
        if self._counts.total() > self._limit or self._counts[self._address] > max(1, self._limit // 2):
            transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._counts[self._address] -= 1
        if not self._counts[self._address]:
            del self._counts[self._address]
        super().connection_lost(exc)


def _connection_limit(options: ServeOptions) -> int:
    """Return the connection limit; at least half of the process's file descriptors stay free for other purposes."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return options.max_connections if files == resource.RLIM_INFINITY else min(options.max_connections, files // 2)
