"""Where a command works: its database, and who is at the keyboard."""

import atexit
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands.arguments import (
    DATA,
    AdminTokenFile,
    AllowInsecureHttp,
    CaFile,
    ClientCert,
    ClientKey,
    DataDir,
    Db,
    Server,
)
from shared.problems import DistransError

if TYPE_CHECKING:
    from server.commands.coordinator import Coordinator
    from server.service.context import Actor, Context
    from server.store.session import Database


Connect = Callable[[], "Coordinator"]  # opens the coordinator that a command works on


def url_of(db: str | None, data_dir: Path) -> str:
    """The address of the database."""
    from server.settings import default_db_url, with_password

    return with_password(db) if db else default_db_url(data_dir)


def open_database(db: str | None, data_dir: Path, *, create: bool = False) -> "Database":
    """The database; without `create`, one that must be there already."""
    from server.store.session import Database

    database = Database(url_of(db, data_dir), os.environ.get("DISTRANS_BLOBS") or None, create=create)
    atexit.register(database.close)  # SQLite puts its -wal file away when the last connection closes
    return database


def open_context(db: str | None, data_dir: Path) -> "Context":
    """What use cases need, on a database of this program's schema."""
    from server.service.context import Context
    from server.store.schema import require_current

    database = open_database(db, data_dir)
    require_current(database, upgrade_command(db, data_dir))
    return Context(database)


def on_coordinator(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say where it works; its first argument opens the coordinator there."""
    own = list(signature(command).parameters.values())[1:]
    place = signature(_open).parameters.values()

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        where = {parameter.name: options.pop(parameter.name) for parameter in place if parameter.name in options}
        with ExitStack() as stack:
            command(lambda: stack.enter_context(_open(**where)), *arguments, **options)

    every = [*own, *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in place)]
    run.__signature__ = Signature(every)  # type: ignore[attr-defined]  # what typer looks at
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    del run.__wrapped__  # or typer would look at that
    return run


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
    """The coordinator on this database or, with `server`, at that address."""
    if server is None:
        from server.commands.local import LocalCoordinator

        yield LocalCoordinator(open_context(db, data_dir), operator())
        return
    if db is not None and db != os.environ.get("DISTRANS_DB"):
        raise DistransError(
            "--server and --db exclude each other.", next_step="Leave out --db, or unset DISTRANS_SERVER."
        )
    from server.commands.remote import RemoteCoordinator, admin_token
    from shared.http.connection import Connection

    files = {"ca_file": ca_file, "client_cert": client_cert, "client_key": client_key}
    named = {option: str(file) for option, file in files.items() if file is not None}
    connection = Connection(server=server, allow_insecure_http=allow_insecure_http, **named)
    connection.check()
    with closing(RemoteCoordinator(connection, admin_token(admin_token_file))) as coordinator:
        yield coordinator


def upgrade_command(db: str | None, data_dir: Path) -> str:
    """What to type to upgrade this database; what stands in the environment need not be said again."""
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
    """The person at the keyboard, for the audit log."""
    import getpass

    from server.service.context import Actor

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Actor(f"operator:{user}", "command line")
