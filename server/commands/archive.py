"""`distrans-server federation export` and `import`."""

from pathlib import Path
from typing import Annotated

import typer

from server.commands.arguments import DATA, DataDir, Db, Federation, NoServer
from server.commands.output import out, print_federation
from server.commands.place import open_context, operator


def export(
    name: Federation,
    target: Annotated[Path, typer.Argument(help="A new folder, or a file ending in .zip.")],
    data_dir: DataDir = DATA,
    db: Db = None,
    _server: NoServer = None,
) -> None:
    """Write model, plan, history and offsets into a folder or a zip."""
    from server.service import archive

    out.print(f"Wrote {archive.export(open_context(db, data_dir), operator(), name, target)}.")


def import_(
    source: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    name: Annotated[str | None, typer.Option(help="Another name than the exported one.")] = None,
    data_dir: DataDir = DATA,
    db: Db = None,
    _server: NoServer = None,
) -> None:
    """Bring an exported federation back; sites join it again with new invites."""
    from server.service import archive, federations

    ctx = open_context(db, data_dir)
    print_federation(federations.show(ctx, archive.restore(ctx, operator(), source, name)))
