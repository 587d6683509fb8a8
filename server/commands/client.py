"""`distrans-server client`."""

import typer
from rich.table import Table

from server.commands.arguments import Client, Federation, Json
from server.commands.output import activity_cells, out, print_json, print_table
from server.commands.place import Connect, on_coordinator

app = typer.Typer(no_args_is_help=True, help="The clients of a federation.")


@app.command("list")
@on_coordinator
def list_(connect: Connect, name: Federation, as_json: Json = False) -> None:
    """The clients of a federation."""
    at = connect()
    views = at.clients(name)
    if as_json:
        print_json(views)
        return
    table = Table("client", "id", "state", "doing", "trouble", "last seen", "images", "classes", "device", "agent")
    for view in views:
        held = [label for label, count in view.class_counts.items() if count]
        images = str(sum(view.class_counts.values()))
        cells = (images, ", ".join(held[:10]), view.device, view.agent_version)
        table.add_row(view.name, view.id, view.state, *activity_cells(view, at.now()), *cells)
    print_table(table)


@app.command()
@on_coordinator
def revoke(connect: Connect, name: Federation, client: Client) -> None:
    """End a client's access; rounds no longer wait for it."""
    connect().revoke_client(name, client)
    out.print(f"Client {client} of {name} is revoked.")


@app.command()
@on_coordinator
def rotate(connect: Connect, name: Federation, client: Client) -> None:
    """Print a new token for a client; the old one ends at once."""
    typer.echo(connect().rotate_client(name, client).token)
