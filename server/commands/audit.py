"""`distrans-server audit`."""

import csv
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from server.commands.options import Json
from server.commands.output import format_time, out, print_json
from server.commands.target import Connect, on_coordinator
from shared.contract.errors import DistransError
from shared.system.command_line import print_table

app = typer.Typer(no_args_is_help=True, help="Read the audit log: who did what, when, from where.")


@app.command("list")
@on_coordinator
def list_(
    connect: Connect,
    federation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show this federation's entries only.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the audit log, oldest entry first."""
    entries = connect().audit(federation)
    if as_json:
        print_json(entries)
        return
    table = Table("time (UTC)", "who", "what", "federation", "from", "detail")
    for entry in entries:
        table.add_row(format_time(entry.at), entry.actor, entry.action, entry.federation, entry.address, entry.detail)
    print_table(table)


@app.command()
@on_coordinator
def export(
    connect: Connect,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write: JSON lines if it ends in .jsonl, else CSV.")
    ],
) -> None:
    """Write the whole audit log to a file."""
    from shared.contract.messages import AuditView

    entries = connect().audit()
    try:
        with file.open("w", newline="", encoding="utf-8") as handle:
            if file.suffix == ".jsonl":
                handle.writelines(entry.model_dump_json() + "\n" for entry in entries)
            else:
                writer = csv.DictWriter(handle, list(AuditView.model_fields))
                writer.writeheader()
                writer.writerows(entry.model_dump() for entry in entries)
    except OSError as error:
        raise DistransError(f"{file} cannot be written: {error.strerror}.") from error
    out.print(f"Wrote {file}.")
