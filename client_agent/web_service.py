"""The site's web service on its socket."""

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
from shared.http.addresses import as_counted
from shared.http.listener import Listener, listen
from shared.http.protocol import Protocol

logger = logging.getLogger(__name__)
_STOP_WAIT_S = 30.0


@contextmanager
def serving(app: FastAPI, options: ServeOptions, on_failure: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Serve in a thread with an event loop of its own; the port. At the end requests under way are finished.

    `on_failure` is called when the service ends by itself, which would leave a port that nobody answers.
    """
    options.check()
    most = _most_connections(options)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        **(options.tls.options() if options.tls else {}),
        http=partial(_Connection, most=most, counts=Counter()) if options.tls is None else Protocol,  # type: ignore[arg-type]  # called
        loop="auto" if options.tls is None else "shared.http.listener:TlsLoop",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on the caller's address
        timeout_graceful_shutdown=5,
    )
    with (
        listen(config) as bound,
        bound if options.tls is None else Listener(bound, total=most, per_address=max(1, most // 2)) as listening,
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
        logger.critical("the web service has failed", exc_info=True)
    if not server.should_exit:
        on_failure()


class _Connection(Protocol):
    """Closes connections over a limit, half of which one address may have.

    A Listener counts better, since connections get here only after their TLS handshake. But only asyncio's event loop
    asks it; with uvloop, a prediction takes a third less of a processor's time. So it is used with TLS alone.
    """

    def __init__(self, *arguments: Any, most: int, counts: Counter[str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._most, self._counts, self._address = most, counts, ""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._address = as_counted(self.client[0]) if self.client else ""
        self._counts[self._address] += 1
        if self._counts.total() > self._most or self._counts[self._address] > max(1, self._most // 2):
            transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._counts[self._address] -= 1
        if not self._counts[self._address]:
            del self._counts[self._address]
        super().connection_lost(exc)


def _most_connections(options: ServeOptions) -> int:
    """Leave half of the files that the process may open to images, models and the coordinator."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return options.max_connections if files == resource.RLIM_INFINITY else min(options.max_connections, files // 2)
