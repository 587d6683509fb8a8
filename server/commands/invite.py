"""`distrans-server invite`."""

from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup
from typing_extensions import override

from server.commands.options import Federation, Json
from server.commands.output import format_time, out, print_json
from server.commands.target import Connect, on_coordinator
from shared.contract.errors import DistransError
from shared.system.command_line import examples, print_table


class _Verbs(TyperGroup):
    """Points users of the former `distrans-server invite FEDERATION` to `invite create`."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            raise DistransError(
                f"Unknown command: distrans-server invite {args[0]}.",
                next_step=f"To invite a site to this federation, run: distrans-server invite create {args[0]}",
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Verbs, no_args_is_help=True, help="Create, list and revoke invites.")


@app.command(
    epilog=examples(
        "distrans-server invite create lung --note 'Hospital North'",
        "distrans-server invite create lung --hours 24 > invite.txt",
    )
)
@on_coordinator
def create(
    connect: Connect,
    name: Federation,
    hours: Annotated[
        float, typer.Option(min=0.01, max=8760, metavar="HOURS", help="Hours until the invite expires.")
    ] = 168,
    note: Annotated[
        str, typer.Option(metavar="TEXT", help="Who the invite is for, as shown by `invite list`.", show_default="none")
    ] = "",
) -> None:
    """Print an invite token that lets one site join."""
    if len(note) > 200 or not note.isprintable():
        raise DistransError("--note must be one line of at most 200 characters.")
    typer.echo(connect().invite(name, hours * 3600, note.strip()).token)


@app.command("list")
@on_coordinator
def list_(connect: Connect, name: Federation, as_json: Json = False) -> None:
    """List a federation's invites and who used them."""
    views = connect().invites(name)
    if as_json:
        print_json(views)
        return
    table = Table("id", "created (UTC)", "expires (UTC)", "state", "note")
    for view in views:
        state = f"used by {view.used_by}" if view.used_by else view.state
        table.add_row(view.id, format_time(view.created_at), format_time(view.expires_at), state, view.note)
    print_table(table)


@app.command()
@on_coordinator
def revoke(
    connect: Connect,
    name: Federation,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="Id of the invite, from `invite list`.")],
) -> None:
    """Revoke an unused invite."""
    connect().revoke_invite(name, invite)
    out.print(f"Revoked invite {invite} of federation {name}.", highlight=False)
