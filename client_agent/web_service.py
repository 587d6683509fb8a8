"""The site's web service on its socket."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from client_agent.settings import ServeOptions
from shared.http.listen import listen

logger = logging.getLogger(__name__)
_STOP_WAIT_S = 30.0


@contextmanager
def serving(app: FastAPI, options: ServeOptions) -> Iterator[int]:
    """Serve in a thread with an event loop of its own; the port. At the end requests under way are finished."""
    options.check()
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        **(options.tls.options() if options.tls else {}),
        http="shared.http.protocol:Protocol",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on the caller's address
        timeout_graceful_shutdown=5,
    )
    socket = listen(config)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[socket]), name="web", daemon=True)
    thread.start()
    port: int = socket.getsockname()[1]
    scheme, host = "https" if options.tls else "http", f"[{options.host}]" if ":" in options.host else options.host
    logger.info("serving /predict on %s://%s:%d", scheme, host, port)
    for risk in options.risks():
        logger.warning(risk)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(_STOP_WAIT_S)
        socket.close()
