"""`distrans-server client`."""

import typer
from rich.table import Table

from server.commands.options import Client, Federation, Json
from server.commands.output import activity_cells, images_cell, out, print_json
from server.commands.target import Connect, on_coordinator
from shared.system.command_line import print_table

app = typer.Typer(no_args_is_help=True, help="List clients, revoke their access, replace their tokens.")


@app.command("list")
@on_coordinator
def list_(connect: Connect, name: Federation, as_json: Json = False) -> None:
    """List the clients of a federation."""
    coordinator = connect()
    views = coordinator.clients(name)
    if as_json:
        print_json(views)
        return
    table = Table("client", "id", "state", "doing", "trouble", "last seen", "images", "classes", "device", "agent")
    for view in views:
        held = [label for label, count in view.class_counts.items() if count]
        cells = (images_cell(view), ", ".join(held[:10]) or "withheld", view.device, view.agent_version)
        table.add_row(view.name, view.id, view.state, *activity_cells(view, coordinator.now()), *cells)
    print_table(table)


@app.command()
@on_coordinator
def revoke(connect: Connect, name: Federation, client: Client) -> None:
    """Revoke a client's access. Rounds no longer wait for it."""
    connect().revoke_client(name, client)
    out.print(f"Revoked client {client} of federation {name}.")


@app.command()
@on_coordinator
def rotate(connect: Connect, name: Federation, client: Client) -> None:
    """Print a new token for a client. The old one stops working at once."""
    typer.echo(connect().rotate_client(name, client).token)
