"""The schema version: upgrades it, and refuses to work with the wrong one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from server.store.database import Database, DatabaseError
from server.store.failures import is_busy


def _config() -> Config:
    installed = Path(__file__).resolve().parent.parent / "_migrations"
    folder = installed if installed.is_dir() else installed.parent.parent / "migrations"
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def current_version(db: Database) -> str | None:
    """Return the database's schema revision, or None if it is empty."""
    with _readable_errors(), db.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def upgrade(db: Database) -> tuple[str | None, str | None]:
    """Upgrade the schema to this program's version; return (before, after). Concurrent calls wait for the first."""
    config = _config()
    with _readable_errors(), db.migration() as connection:
        context = MigrationContext.configure(connection)
        before = context.get_current_revision()
        _refuse_newer(before)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        return before, context.get_current_revision()


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        cause = str(error.orig).strip().splitlines()[0] if error.orig else "no reason given"
        if is_busy(error):
            raise DatabaseError(
                f"The database is in use: {cause}.", next_step="Try again; if that fails, stop the coordinators first."
            ) from error
        raise DatabaseError(f"Cannot reach the database: {cause}.", next_step="Check --db or DISTRANS_DB.") from error


def require_current(db: Database, upgrade_command: str = "distrans-server db upgrade") -> None:
    """Raise DatabaseError, with the upgrade command, unless the schema is current."""
    found = current_version(db)
    _refuse_newer(found)
    wanted = ScriptDirectory.from_config(_config()).get_current_head()
    if found != wanted:
        state = "is empty" if found is None else f"has schema {found}, older than {wanted}"
        raise DatabaseError(f"The database {state}.", next_step=f"Run: {upgrade_command}")


def _refuse_newer(found: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if found is not None and found not in known:
        raise DatabaseError(
            f"The database has schema {found}, which is newer than this program.",
            next_step="Install the newer release: pip install --upgrade distrans",
        )
