"""`distrans-server db`."""

from pathlib import Path
from typing import Annotated

import typer

from server.commands.arguments import DATA, DataDir, Db, NoServer
from server.commands.output import out
from server.commands.place import open_database

app = typer.Typer(no_args_is_help=True, help="The database.")


@app.command()
def upgrade(data_dir: DataDir = DATA, db: Db = None, _server: NoServer = None) -> None:
    """Bring the database's schema to this program's version."""
    from server.store import schema

    before, after = schema.upgrade(open_database(db, data_dir, create=True))
    out.print(f"The schema is at {after} already." if before == after else f"Schema: {before or 'empty'} → {after}.")


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="A new file.")],
    data_dir: DataDir = DATA,
    db: Db = None,
    _server: NoServer = None,
) -> None:
    """Copy the embedded database to a file while the coordinator runs."""
    from server.store import backup

    out.print(f"Wrote {file}, {backup.backup(open_database(db, data_dir), file)} bytes.")
