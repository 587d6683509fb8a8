"""`distrans-server invite` and `distrans-server client`."""

from typing import Annotated

import typer
from rich.table import Table

from server.commands.arguments import DATA, Client, DataDir, Db, Federation, Json
from server.commands.output import activity_cells, out, print_json, print_table
from server.commands.place import open_context, operator

app = typer.Typer(no_args_is_help=True, help="The clients of a federation.")


def invite(
    name: Federation,
    hours: Annotated[float, typer.Option(min=0.01, max=8760, help="How long it may wait to be used.")] = 168,
    data_dir: DataDir = DATA,
    db: Db = None,
) -> None:
    """Print a one-use invite token for a site."""
    from server.service import enrolment

    typer.echo(enrolment.invite(open_context(db, data_dir), operator(), name, hours * 3600).token)


@app.command("list")
def list_(name: Federation, data_dir: DataDir = DATA, db: Db = None, as_json: Json = False) -> None:
    """The clients of a federation."""
    from server.service import enrolment

    ctx = open_context(db, data_dir)
    views = enrolment.clients_of(ctx, name)
    if as_json:
        print_json(views)
        return
    table = Table("client", "id", "state", "doing", "trouble", "last seen", "images", "classes", "device", "agent")
    for view in views:
        held = [label for label, count in view.class_counts.items() if count]
        images = str(sum(view.class_counts.values()))
        cells = (images, ", ".join(held[:10]), view.device, view.agent_version)
        table.add_row(view.name, view.id, view.state, *activity_cells(view, ctx.clock()), *cells)
    print_table(table)


@app.command()
def revoke(name: Federation, client: Client, data_dir: DataDir = DATA, db: Db = None) -> None:
    """End a client's access; rounds no longer wait for it."""
    from server.service import enrolment

    enrolment.revoke(open_context(db, data_dir), operator(), name, client)
    out.print(f"Client {client} of {name} is revoked.")


@app.command()
def rotate(name: Federation, client: Client, data_dir: DataDir = DATA, db: Db = None) -> None:
    """Print a new token for a client; the old one ends at once."""
    from server.service import enrolment

    typer.echo(enrolment.rotate(open_context(db, data_dir), operator(), name, client).token)
