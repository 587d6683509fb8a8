"""Runs migrations on a given connection, or on the database in DISTRANS_DB or else in alembic.ini."""

import os

from alembic import context
from sqlalchemy import Connection

from server.store.database import Database
from server.store.tables import Base


def run() -> None:
    """Migrate in a single transaction."""
    given = context.config.attributes.get("connection")
    if given is not None:
        migrate(given)
        return
    url = os.environ.get("DISTRANS_DB") or context.config.get_main_option("sqlalchemy.url") or ""
    with Database(url).migration() as connection:
        migrate(connection)


def migrate(connection: Connection) -> None:
    """Run the migrations. Batch mode copies tables, because SQLite cannot alter them in place."""
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_type=True)
    with context.begin_transaction():
        context.run_migrations()


run()
