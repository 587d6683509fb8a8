"""`distrans-server invite`: what lets a site join."""

from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup
from typing_extensions import override

from server.commands.arguments import Federation, Json
from server.commands.output import out, print_json, print_table, when
from server.commands.place import Connect, on_coordinator
from shared.problems import DistransError


class _Verbs(TyperGroup):
    """Explains what has become of `distrans-server invite FEDERATION`."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            raise DistransError(
                f"`invite` has no command {args[0]!r}.",
                next_step=f"To invite a site to a federation of that name: distrans-server invite create {args[0]}",
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Verbs, no_args_is_help=True, help="Create, list and revoke invites.")


@app.command()
@on_coordinator
def create(
    connect: Connect,
    name: Federation,
    hours: Annotated[float, typer.Option(min=0.01, max=8760, help="Hours until the invite expires.")] = 168,
    note: Annotated[str, typer.Option(help="Whom it is for; `invite list` shows it.")] = "",
) -> None:
    """Print a one-use invite token for a site."""
    if len(note) > 200 or not note.isprintable():
        raise DistransError("--note takes a line of at most 200 characters.")
    typer.echo(connect().invite(name, hours * 3600, note.strip()).token)


@app.command("list")
@on_coordinator
def list_(connect: Connect, name: Federation, as_json: Json = False) -> None:
    """The invites of a federation: which are open, and who has used the others."""
    views = connect().invites(name)
    if as_json:
        print_json(views)
        return
    table = Table("id", "created (UTC)", "expires (UTC)", "state", "note")
    for view in views:
        state = f"used by {view.used_by}" if view.used_by else view.state
        table.add_row(view.id, when(view.created_at), when(view.expires_at), state, view.note)
    print_table(table)


@app.command()
@on_coordinator
def revoke(connect: Connect, name: Federation, invite: Annotated[str, typer.Argument(help="The invite's id.")]) -> None:
    """Revoke an unused invite."""
    connect().revoke_invite(name, invite)
    out.print(f"Invite {invite} of {name} is revoked.", highlight=False)
