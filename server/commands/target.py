"""The coordinator a command works on, local or remote, and the operator who runs it."""

import atexit
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands.options import (
    DATA,
    AdminTokenFile,
    AllowInsecureHttp,
    CaFile,
    ClientCert,
    ClientKey,
    DataDir,
    Db,
    Server,
    show_to_typer,
)
from shared.contract.errors import DistransError

if TYPE_CHECKING:
    from server.commands.coordinator import Coordinator
    from server.service.context import Actor, Context
    from server.store.database import Database


Connect = Callable[[], "Coordinator"]  # opens the coordinator the command works on


def database_url(db: str | None, data_dir: Path) -> str:
    """Return the URL of the database."""
    from server.service.settings import default_db_url, with_password

    return with_password(db) if db else default_db_url(data_dir)


def open_database(db: str | None, data_dir: Path, *, create: bool = False) -> "Database":
    """Open the database; raise if it does not exist, unless `create` is set."""
    from server.store.database import Database

    database = Database(database_url(db, data_dir), os.environ.get("DISTRANS_BLOBS") or None, create=create)
    atexit.register(database.close)  # SQLite removes its -wal file when the last connection closes
    return database


def open_context(db: str | None, data_dir: Path) -> "Context":
    """Return the context for use cases; raise if the database schema is not current."""
    from server.service.context import Context
    from server.store.schema import require_current

    database = open_database(db, data_dir)
    require_current(database, upgrade_command(db, data_dir))
    return Context(database)


def on_coordinator(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select a coordinator; the command's first argument opens it."""
    own = list(signature(command).parameters.values())[1:]
    target = signature(_open).parameters.values()

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        where = {parameter.name: options.pop(parameter.name) for parameter in target if parameter.name in options}
        with ExitStack() as stack:
            command(lambda: stack.enter_context(_open(**where)), *arguments, **options)

    return show_to_typer(run, [*own, *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in target)])


@contextmanager
def _open(
    data_dir: DataDir = DATA,
    db: Db = None,
    server: Server = None,
    admin_token_file: AdminTokenFile = None,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    allow_insecure_http: AllowInsecureHttp = False,
) -> "Iterator[Coordinator]":
    """Open the coordinator on this database or, with `server`, at that URL."""
    if server is None:
        from server.commands.local import LocalCoordinator

        yield LocalCoordinator(open_context(db, data_dir), operator())
        return
    if db is not None and db != os.environ.get("DISTRANS_DB"):
        raise DistransError(
            "--server and --db cannot be combined.", next_step="Leave out one of them, or unset DISTRANS_SERVER."
        )
    from server.commands.remote import RemoteCoordinator, admin_token
    from shared.http.client_connection import Connection

    files = {"ca_file": ca_file, "client_cert": client_cert, "client_key": client_key}
    named = {option: str(file) for option, file in files.items() if file is not None}
    connection = Connection(server=server, allow_insecure_http=allow_insecure_http, **named)
    connection.check()
    with closing(RemoteCoordinator(connection, admin_token(admin_token_file))) as coordinator:
        yield coordinator


def upgrade_command(db: str | None, data_dir: Path) -> str:
    """Return the command that upgrades this database, without options that are set in the environment."""
    from sqlalchemy.engine import make_url

    command = "distrans-server db upgrade"
    if db is not None and db != os.environ.get("DISTRANS_DB"):
        url = make_url(db)
        shown = url.render_as_string(hide_password=True) if url.password else db
        return f"{command} --db {shlex.quote(shown)}"
    if db is None and str(data_dir) not in (str(DATA), os.environ.get("DISTRANS_DATA_DIR")):
        return f"{command} --data-dir {shlex.quote(str(data_dir))}"
    return command


def operator() -> "Actor":
    """Return the current user, for the audit log."""
    import getpass

    from server.service.context import Actor

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Actor(f"operator:{user}", "command line")
