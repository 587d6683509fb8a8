"""Where a command works: its database, and who is at the keyboard."""

import atexit
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from server.commands.arguments import DATA

if TYPE_CHECKING:
    from server.service.context import Actor, Context
    from server.store.session import Database


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
