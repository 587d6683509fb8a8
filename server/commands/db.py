"""`distrans-server db`."""

from pathlib import Path
from typing import Annotated

import typer

from server.commands.options import DATA, DataDir, Db, without_server
from server.commands.output import out
from server.commands.target import open_database

app = typer.Typer(no_args_is_help=True, help="Upgrade or back up the database.")


@app.command()
@without_server
def upgrade(data_dir: DataDir = DATA, db: Db = None) -> None:
    """Upgrade the database schema to the version of this program."""
    from server.store import schema

    before, after = schema.upgrade(open_database(db, data_dir, create=True))
    out.print(
        f"The schema is already at {after}."
        if before == after
        else f"Upgraded the schema: {before or 'empty'} → {after}."
    )


@app.command()
@without_server
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file to write.")],
    data_dir: DataDir = DATA,
    db: Db = None,
) -> None:
    """Back up the embedded database, even while in use."""
    from server.store import backup

    out.print(f"Wrote {file} ({backup.backup(open_database(db, data_dir), file)} bytes).")
