"""`distrans-server audit`."""

import csv
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from server.commands.arguments import DATA, DataDir, Db, Json
from server.commands.output import out, print_json, print_table
from server.commands.place import open_context
from shared.problems import DistransError

app = typer.Typer(no_args_is_help=True, help="Who did what, when, from where.")


@app.command("list")
def list_(
    federation: Annotated[str | None, typer.Option(help="Only this federation's.")] = None,
    data_dir: DataDir = DATA,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """The audit log."""
    from server.service.audit import all_entries

    entries = all_entries(open_context(db, data_dir), federation)
    if as_json:
        print_json(entries)
        return
    table = Table("time (UTC)", "who", "what", "federation", "from", "detail")
    for entry in entries:
        at = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(at, entry.actor, entry.action, entry.federation, entry.address, entry.detail)
    print_table(table)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A .csv file, or .jsonl.")], data_dir: DataDir = DATA, db: Db = None
) -> None:
    """Write the whole audit log to a file."""
    from server.service.audit import all_entries
    from shared.schemas import AuditView

    entries = all_entries(open_context(db, data_dir))
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
