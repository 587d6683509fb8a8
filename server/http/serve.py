"""Runs the coordinator: one or several uvicorn processes on one socket."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from pythonjsonlogger.json import JsonFormatter
from typing_extensions import override
from uvicorn.supervisors import Multiprocess

from server.service.settings import Settings
from shared.contract.errors import DistransError
from shared.http import listener
from shared.http.listener import Listener, TlsLoop
from shared.http.request_id import RequestIdFilter
from shared.http.server_tls import Tls

if TYPE_CHECKING:
    from fastapi import FastAPI

# Worker processes inherit the environment, which other processes of the same user can read, but do not need these.
_SECRETS = (
    "DISTRANS_ADMIN_TOKEN",
    "DISTRANS_SCRAPE_TOKEN",
    "DISTRANS_VIEWER_TOKEN",
    "DISTRANS_DB",
    "DISTRANS_DB_PASSWORD",
)
_OTHER_FILES = 128  # descriptors for anything but callers' connections: database, object store, files, libraries
_DEFAULT_MAX_CONNECTIONS = 4096  # unless set otherwise
# How long a thread may keep others from running Python: the event loop waits for its turn after every system call. At
# Python's default of 5 ms, it would spend most of a busy moment waiting.
_THREAD_TURN_S = 0.0005
_ALLOCATIONS_PER_COLLECTION = 10_000  # of reference cycles; a thousand polls hold more objects than Python's default
_WORKER_SILENT_S = 60  # on a busy machine, even a healthy worker may take long to answer its supervisor


@dataclass(frozen=True)
class ListenOptions:
    """Where and how to listen, and how to log."""

    host: str = "127.0.0.1"
    port: int = 8400
    workers: int = 1
    tls: Tls | None = None
    log_format: str = "text"
    log_level: str = "info"


def open_socket(listen: ListenOptions) -> socket.socket:
    """Bind to the port and listen; raise if that or the TLS files fail. Requests wait until `serve` is called."""
    if listen.tls is not None:
        listen.tls.check()
    return listener.listen(listen.host, listen.port)


def serve(settings: Settings, listen: ListenOptions, listening: socket.socket) -> None:
    """Serve on the socket until SIGTERM or Ctrl-C, then finish the open requests."""
    connection_limits(settings)  # raises if the settings cannot work
    config = uvicorn.Config(
        WorkerApp(settings, listen.log_format, listen.log_level),
        factory=True,
        workers=listen.workers,
        **(listen.tls.options() if listen.tls else {}),
        # By name, because a worker must be able to answer its supervisor before it imports this.
        http="shared.http.server_protocol:Protocol",
        timeout_worker_healthcheck=_WORKER_SILENT_S,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # server.http.proxies handles them
        timeout_graceful_shutdown=30,
        lifespan="on",
        loop="server.http.serve:Loop",
    )
    scheme = "https" if listen.tls else "http"
    logging.getLogger("server").info("listening on %s://%s:%d", scheme, listen.host, listening.getsockname()[1])
    if listen.workers > 1:
        for variable in _SECRETS:
            os.environ.pop(variable, None)
        Multiprocess(config, sockets=[listening]).run()
    else:
        server = uvicorn.Server(config)
        # uvicorn installs the same handlers, but later, and passes signals on once it has stopped.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        server.run(sockets=[listening])


def connection_limits(settings: Settings) -> tuple[int, int]:
    """Return how many connections this process may have open: in total, and per address.

    Some of the open files are held in reserve: a process without descriptors cannot even read its database.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = max(files - _OTHER_FILES, files // 2) if files != resource.RLIM_INFINITY else sys.maxsize
    if settings.max_connections > limit:
        raise DistransError(
            f"DISTRANS_MAX_CONNECTIONS is {settings.max_connections}, but a process with a limit of {files} open files "
            f"can serve at most {limit} connections.",
            next_step="Raise the limit on open files (ulimit -n, or LimitNOFILE= in the systemd unit).",
        )
    total = settings.max_connections or min(limit, _DEFAULT_MAX_CONNECTIONS)
    return total, settings.connections_per_address or max(1, total // 2)


class Loop(TlsLoop):
    """A worker's event loop, which limits its connections."""

    settings: Settings  # set by WorkerApp, which uvicorn calls before it listens

    @override
    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        total, per_address = connection_limits(self.settings)
        options["sock"] = Listener(
            options["sock"], total=total, per_address=per_address, exempt=self.settings.trusted_proxies
        )
        return await super().create_server(*arguments, **options)


@dataclass(frozen=True)
class WorkerApp:
    """Creates the application in a worker process, which receives this object through a pipe.

    The application is not imported before that: a new worker must soon answer its supervisor.
    """

    settings: Settings
    log_format: str
    log_level: str

    def __call__(self) -> "FastAPI":
        """Return the application. Call it in the event loop that will run it."""
        from server.http.app import create_app
        from shared.learning import methods

        configure_logging(self.log_format, self.log_level)
        sys.setswitchinterval(_THREAD_TURN_S)
        loop = asyncio.get_running_loop()
        if isinstance(loop, Loop):
            loop.settings = self.settings
        methods.load_server_halves()
        app = create_app(self.settings)
        # What is there now stays. Otherwise the garbage collector would keep looking through all modules, which takes
        # it a large part of a second in which nobody is served.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)
        return app


def configure_logging(log_format: str, level: str) -> None:
    """Log to stderr, one line per event with the request's id, as text or JSON."""
    fields = "%(asctime)s %(levelname)s %(name)s %(request_id)s %(message)s"
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else logging.Formatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
