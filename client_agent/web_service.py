"""The site's web service on its socket."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from client_agent.settings import ServeOptions
from shared.problems import DistransError

logger = logging.getLogger(__name__)
_STOP_WAIT_S = 30.0


@contextmanager
def serving(app: FastAPI, options: ServeOptions) -> Iterator[int]:
    """Serve in a thread with an event loop of its own; the port. At the end requests under way are finished."""
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    try:
        socket = config.bind_socket()
    except SystemExit as error:  # uvicorn has logged why
        raise DistransError(
            f"Cannot listen on {options.host}:{options.port}.", next_step="Is another program there? Try --port."
        ) from error
    socket.listen(config.backlog)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[socket]), name="web", daemon=True)
    thread.start()
    port: int = socket.getsockname()[1]
    logger.info("serving /predict on http://%s:%d", options.host, port)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(_STOP_WAIT_S)
        socket.close()
