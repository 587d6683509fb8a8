"""`distrans-server federation export` and `import`."""

from pathlib import Path
from typing import Annotated

import typer

from server.commands.options import DATA, DataDir, Db, Federation, without_server
from server.commands.output import out, print_federation
from server.commands.target import open_context, operator


@without_server
def export(
    name: Federation,
    target: Annotated[Path, typer.Argument(metavar="PATH", help="New folder, or new file that ends in .zip.")],
    data_dir: DataDir = DATA,
    db: Db = None,
) -> None:
    """Export a federation to a folder or zip file.

    The export holds its plan, model, history and offsets.
    """
    from server.service import archive

    out.print(f"Wrote {archive.export(open_context(db, data_dir), operator(), name, target)}.")


@without_server
def import_(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="Folder or zip file written by `federation export`.")],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the new federation.", show_default="the exported name"),
    ] = None,
    data_dir: DataDir = DATA,
    db: Db = None,
) -> None:
    """Create a federation from an export. Its sites join again with new invites."""
    from server.service import archive, federations

    ctx = open_context(db, data_dir)
    print_federation(federations.show(ctx, archive.restore(ctx, operator(), source, name)))
