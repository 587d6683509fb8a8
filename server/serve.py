"""`distrans-server serve`: one or several uvicorn processes on one socket."""

import asyncio
import logging
import os
import resource
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from pythonjsonlogger.json import JsonFormatter
from typing_extensions import override
from uvicorn.supervisors import Multiprocess

from server.settings import Settings
from shared.http import listener
from shared.http.listener import Listener, TlsLoop
from shared.http.request_id import RequestIdFilter
from shared.http.tls import Tls
from shared.problems import DistransError

if TYPE_CHECKING:
    from fastapi import FastAPI

# Worker processes inherit the environment, which other processes of the same user can read, and need none of these.
_SECRETS = ("DISTRANS_ADMIN_TOKEN", "DISTRANS_SCRAPE_TOKEN", "DISTRANS_DB", "DISTRANS_DB_PASSWORD")
_OTHER_FILES = 128  # descriptors that are not connections to callers: database, object store, files, libraries
_MOST_CONNECTIONS = 4096  # unless the settings say otherwise
_WORKER_SILENT_S = 60  # on a machine that is very busy a healthy worker may take long to answer its supervisor


@dataclass(frozen=True)
class Listen:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 8400
    workers: int = 1
    tls: Tls | None = None
    log_format: str = "text"
    log_level: str = "info"


def serve(settings: Settings, listen: Listen) -> None:
    """Run until SIGTERM or Ctrl-C; requests under way are finished."""
    connection_limits(settings)  # refuses settings that cannot work, before anything is started
    if listen.tls is not None:
        listen.tls.check()
    config = uvicorn.Config(
        WorkerApp(settings, listen.log_format, listen.log_level),
        factory=True,
        host=listen.host,
        port=listen.port,
        workers=listen.workers,
        **(listen.tls.options() if listen.tls else {}),
        # Named, not imported: a worker process imports it once it can answer its supervisor.
        http="shared.http.protocol:Protocol",
        timeout_worker_healthcheck=_WORKER_SILENT_S,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the application does it: it has to know what the proxy said
        timeout_graceful_shutdown=30,
        lifespan="on",
        loop="server.serve:Loop",
    )
    configure_logging(listen.log_format, listen.log_level)
    socket = listener.listen(config)
    scheme = "https" if listen.tls else "http"
    logging.getLogger("server").info("listening on %s://%s:%d", scheme, listen.host, socket.getsockname()[1])
    try:
        if listen.workers > 1:
            for variable in _SECRETS:
                os.environ.pop(variable, None)
            Multiprocess(config, sockets=[socket]).run()
        else:
            server = uvicorn.Server(config)
            # uvicorn sets the same handlers itself, but later, and passes signals on once it has stopped.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, server.handle_exit)
            server.run(sockets=[socket])
    finally:
        socket.close()


def connection_limits(settings: Settings) -> tuple[int, int]:
    """Connections that this process may have open: in total, and from one address.

    The limit on open files keeps a reserve: a process without descriptors cannot even read its database.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(files - _OTHER_FILES, files // 2) if files != resource.RLIM_INFINITY else sys.maxsize
    if settings.max_connections > most:
        raise DistransError(
            f"DISTRANS_MAX_CONNECTIONS is {settings.max_connections}, but a process that may open {files} files "
            f"can serve {most} connections.",
            next_step="Raise the limit on open files (ulimit -n, or LimitNOFILE= in the systemd unit).",
        )
    total = settings.max_connections or min(most, _MOST_CONNECTIONS)
    return total, settings.connections_per_address or max(1, total // 2)


class Loop(TlsLoop):
    """The event loop of a worker: it bounds connections."""

    settings: Settings  # given by the application, which uvicorn creates before it listens

    @override
    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        total, per_address = connection_limits(self.settings)
        options["sock"] = Listener(
            options["sock"], total=total, per_address=per_address, exempt=self.settings.trusted_proxies
        )
        return await super().create_server(*arguments, **options)


@dataclass(frozen=True)
class WorkerApp:
    """Creates the application in a worker process, to which uvicorn sends this through a pipe.

    It loads the application only there and then: a worker must be able to answer its supervisor soon.
    """

    settings: Settings
    log_format: str
    log_level: str

    def __call__(self) -> "FastAPI":
        """Return the application; called in the event loop that will run it."""
        from server.app import create_app
        from shared import methods

        configure_logging(self.log_format, self.log_level)
        loop = asyncio.get_running_loop()
        if isinstance(loop, Loop):
            loop.settings = self.settings
        methods.load_all()
        return create_app(self.settings)


def configure_logging(log_format: str, level: str) -> None:
    """One line an event on stderr, with the request's id: text for people, JSON for programs."""
    fields = "%(asctime)s %(levelname)s %(name)s %(request_id)s %(message)s"
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter(fields) if log_format == "json" else logging.Formatter(fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
