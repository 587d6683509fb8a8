"""`distrans-server serve`: one or several uvicorn processes on one socket."""

import asyncio
import logging
import os
import resource
import signal
import sys
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import TypeAdapter
from pythonjsonlogger.json import JsonFormatter
from typing_extensions import override
from uvicorn.supervisors import Multiprocess

from server.app import create_app
from server.settings import Settings
from shared.http import listener
from shared.http.listener import Listener, TlsLoop
from shared.http.request_id import RequestIdFilter
from shared.http.tls import Tls
from shared.problems import DistransError

# Worker processes are started anew and take the settings from here.
_ENVIRONMENT = "DISTRANS_SERVE_"
_settings = TypeAdapter(Settings)
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
    os.environ[_ENVIRONMENT + "SETTINGS"] = _settings.dump_json(settings).decode()
    os.environ[_ENVIRONMENT + "LOG_FORMAT"] = listen.log_format
    os.environ[_ENVIRONMENT + "LOG_LEVEL"] = listen.log_level
    connection_limits(settings)  # refuses settings that cannot work, before anything is started
    if listen.tls is not None:
        listen.tls.check()
    config = uvicorn.Config(
        "server.serve:create_worker_app",
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
    server = uvicorn.Server(config)
    # uvicorn passes SIGTERM on once it has stopped: an orderly end, not a death.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if listen.workers > 1:
            Multiprocess(config, sockets=[socket]).run()
        else:
            server.run(sockets=[socket])
    except KeyboardInterrupt:  # uvicorn passes the signal on once it has stopped
        pass
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

    @override
    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        settings = _settings_of_worker()
        total, per_address = connection_limits(settings)
        options["sock"] = Listener(
            options["sock"], total=total, per_address=per_address, exempt=settings.trusted_proxies
        )
        return await super().create_server(*arguments, **options)


def create_worker_app() -> FastAPI:
    """The application of one worker process, from the settings that `serve` left in the environment."""
    configure_logging(os.environ[_ENVIRONMENT + "LOG_FORMAT"], os.environ[_ENVIRONMENT + "LOG_LEVEL"])
    return create_app(_settings_of_worker())


def _settings_of_worker() -> Settings:
    return _settings.validate_json(os.environ[_ENVIRONMENT + "SETTINGS"])


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
