"""`distrans-server federation`; `export` and `import` are in archive.py."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from server.commands.options import Federation, Json
from server.commands.output import (
    activity_cells,
    federation_lines,
    format_bytes,
    images_cell,
    missing_cell,
    out,
    percent,
    print_federation,
    print_json,
    state_cell,
)
from server.commands.target import Connect, on_coordinator
from server.commands.verdicts import verdict_section
from server.commands.watch import watch
from shared.contract.errors import DistransError
from shared.system.command_line import examples, print_table, print_warning

if TYPE_CHECKING:
    from rich.console import RenderableType

    from server.commands.coordinator import Coordinator
    from shared.contract.messages import FederationView

app = typer.Typer(no_args_is_help=True, help="Manage federations.")
_ROUNDS_SHOWN = 10


@app.command(
    epilog=examples(
        "distrans-server federation create --example > lung.toml",
        "distrans-server federation create lung.toml",
        "distrans-server federation create lung.toml --server https://fl.example.org",
    )
)
@on_coordinator
def create(
    connect: Connect,
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="TOML file with the plan.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented example plan and exit.")] = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='File with the initial weights, for plans with model.weights = "file".'),
    ] = None,
) -> None:
    """Create a federation from a plan."""
    from server.commands.example_plan import EXAMPLE_PLAN
    from shared.contract.plan import parse_plan
    from shared.contract.plan_warnings import plan_warnings

    if example:
        typer.echo(EXAMPLE_PLAN, nl=False)
        return
    if plan is None:
        raise DistransError(
            "No plan file was given.", next_step="To get one: distrans-server federation create --example > plan.toml"
        )
    try:
        parsed = parse_plan(plan.read_text(encoding="utf-8"))
    except OSError as error:
        raise DistransError(f"{plan} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DistransError(f"{plan} is not UTF-8 text.") from error
    connect().create(parsed, weights)
    for warning in plan_warnings(parsed):
        print_warning(warning)
    out.print(f"Created federation {parsed.name}. Next: distrans-server invite create {parsed.name}")


@app.command("list")
@on_coordinator
def list_(connect: Connect, as_json: Json = False) -> None:
    """List all federations."""
    views = connect().federations()
    if as_json:
        print_json(views)
        return
    table = Table("federation", "state", "rounds", "clients", "DH", "best accuracy", "status")
    for view in views:
        table.add_row(
            view.name,
            view.state,
            f"{view.rounds_done} of {view.rounds_total}",
            str(view.clients),
            percent(view.dh, 0),
            percent(view.best_accuracy),
            view.waiting_for or view.reason,
        )
    print_table(table)


@app.command(
    epilog=examples(
        "distrans-server federation show lung",
        "distrans-server federation show lung --watch --interval 10",
        "distrans-server federation show lung --watch >> lung.log",
    )
)
@on_coordinator
def show(
    connect: Connect,
    name: Federation,
    as_json: Annotated[bool, typer.Option("--json", help="Print the federation and its plan as JSON.")] = False,
    follow: Annotated[
        bool,
        typer.Option("--watch", help="Refresh until the federation ends; when piped, print one line per change."),
    ] = False,
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval", min=0.1, max=3600, metavar="SECONDS", help="With --watch: seconds between refreshes."
        ),
    ] = 2.0,
) -> None:
    """Show a federation with its clients, its latest rounds, and whether joining paid off."""
    coordinator = connect()
    if as_json:
        typer.echo(coordinator.federation(name).model_dump_json(indent=2))
    elif follow:
        watch(coordinator, name, lambda view: _shown(coordinator, view), interval_s)
    else:
        view = coordinator.federation(name)
        print_federation(view)
        for part in _sections(coordinator, view):
            if isinstance(part, Table):
                print_table(part)
            else:
                out.print(part, highlight=False)


def _shown(coordinator: "Coordinator", view: "FederationView") -> "list[RenderableType]":
    return [*federation_lines(view), *_sections(coordinator, view)]


def _sections(coordinator: "Coordinator", view: "FederationView") -> "list[RenderableType]":
    """Return tables of the federation's clients and its latest rounds, and whether joining paid off."""
    clients = Table("client", "state", "images", "device", "doing", "trouble", "last seen")
    now, patience_s = coordinator.now(), math.inf if view.plan is None else view.plan.rounds.absent_after_s
    for client in coordinator.clients(view.name):
        state = state_cell(client, now, patience_s)
        clients.add_row(client.name, state, images_cell(client), client.device, *activity_cells(client, now))
    rounds = Table("round", "state", "updates", "accuracy of its model", "missing", "reason")
    last = view.round.number if view.round else view.latest_model
    if last > _ROUNDS_SHOWN:
        rounds.title = f"The last {_ROUNDS_SHOWN} rounds; `federation export` writes all of them."
        rounds.title_justify = "left"
    for round_ in coordinator.rounds(view.name, max(0, last - _ROUNDS_SHOWN), 2 * _ROUNDS_SHOWN):
        rounds.add_row(
            str(round_.number),
            round_.state,
            f"{round_.updates} of {round_.participants}",
            percent(round_.evaluation.accuracy if round_.evaluation else None),
            missing_cell(round_),
            round_.waiting_for or round_.reason,
        )
    stored = [] if view.stored_bytes is None else [f"Tensors stored: {format_bytes(view.stored_bytes)}"]
    return [clients, rounds, *stored, *verdict_section(view)]


@app.command()
@on_coordinator
def start(connect: Connect, name: Federation) -> None:
    """Start a federation. Its first round opens once enough sites have joined."""
    print_federation(connect().change(name, "start"))


@app.command()
@on_coordinator
def pause(connect: Connect, name: Federation) -> None:
    """Pause a federation. Its deadlines stand still until it is resumed."""
    print_federation(connect().change(name, "pause"))


@app.command()
@on_coordinator
def resume(connect: Connect, name: Federation) -> None:
    """Resume a paused federation."""
    print_federation(connect().change(name, "resume"))


@app.command()
@on_coordinator
def rollback(
    connect: Connect,
    name: Federation,
    to: Annotated[
        int,
        typer.Option(metavar="ROUND", help="Round whose model to publish (0 = initial model).", min=0, max=2**31 - 1),
    ],
) -> None:
    """Publish an older model again and pause the federation. The history is kept."""
    print_federation(connect().rollback(name, to))


@app.command()
@on_coordinator
def cancel(connect: Connect, name: Federation) -> None:
    """Cancel a federation permanently. Its models are kept."""
    print_federation(connect().change(name, "cancel"))


@app.command()
@on_coordinator
def delete(
    connect: Connect,
    name: Federation,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a federation with its models, history and clients. This cannot be undone.

    A running or paused federation must be cancelled first.
    """
    coordinator = connect()
    view = coordinator.federation(name)
    if not yes and view.state not in ("running", "paused"):  # those are refused anyway
        out.print(
            f"This permanently deletes federation {name}: its models, its history ({view.rounds_done} rounds) and its "
            f"clients ({view.clients} active), whose tokens stop working.",
            highlight=False,
        )
        if (typed := typer.prompt("Type the name of the federation to confirm")) != name:
            raise DistransError(f"{typed!r} is not {name!r}.", next_step="Nothing was deleted.")
    coordinator.delete(name)
    out.print(f"Deleted federation {name}.")
