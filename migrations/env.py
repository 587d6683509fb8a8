"""Runs migrations on a connection that is given, or on the address in alembic.ini or in DISTRANS_DB."""

import os

from alembic import context

from server.store.session import Database
from server.store.tables import Base


def run() -> None:
    """Migrate within one transaction."""
    given = context.config.attributes.get("connection")
    if given is not None:
        migrate(given)
        return
    url = os.environ.get("DISTRANS_DB") or context.config.get_main_option("sqlalchemy.url") or ""
    with Database(url).migration() as connection:
        migrate(connection)


def migrate(connection):
    """SQLite cannot alter tables in place: batch mode copies them."""
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_type=True)
    with context.begin_transaction():
        context.run_migrations()


run()
