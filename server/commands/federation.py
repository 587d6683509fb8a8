"""`distrans-server federation`: create, list, show, and the changes of state."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from server.commands.arguments import Federation, Json
from server.commands.output import (
    activity_cells,
    federation_lines,
    missing_cell,
    out,
    percent,
    print_federation,
    print_json,
    print_table,
    state_cell,
)
from server.commands.place import Connect, on_coordinator
from server.commands.watch import watch
from shared.problems import DistransError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from server.commands.coordinator import Coordinator
    from shared.schemas import FederationView

app = typer.Typer(
    no_args_is_help=True,
    help="Create, look at, start, pause, resume, cancel, roll back, delete, export and import federations.",
)


@app.command()
@on_coordinator
def create(
    connect: Connect,
    plan: Annotated[Path | None, typer.Argument(help="The plan, a TOML file.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented plan and exit.")] = False,
    weights: Annotated[Path | None, typer.Option(help="Initial weights, for model.weights = 'file'.")] = None,
) -> None:
    """Create a federation from a plan."""
    from server.example_plan import EXAMPLE_PLAN
    from shared.plan import parse_plan

    if example:
        typer.echo(EXAMPLE_PLAN, nl=False)
        return
    if plan is None:
        raise DistransError("Name a plan file.", next_step="--example prints one to start from.")
    try:
        parsed = parse_plan(plan.read_text(encoding="utf-8"))
    except OSError as error:
        raise DistransError(f"{plan} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DistransError(f"{plan} is not UTF-8 text.") from error
    connect().create(parsed, weights)
    out.print(f"Federation {parsed.name} created. Next: distrans-server invite create {parsed.name}")


@app.command("list")
@on_coordinator
def list_(connect: Connect, as_json: Json = False) -> None:
    """All federations."""
    views = connect().federations()
    if as_json:
        print_json(views)
        return
    table = Table("federation", "state", "rounds", "clients", "DH", "best accuracy", "what now")
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


@app.command()
@on_coordinator
def show(
    connect: Connect,
    name: Federation,
    as_json: Json = False,
    follow: Annotated[
        bool,
        typer.Option("--watch", help="Refresh until the federation has ended; when piped, print a line per change."),
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="With --watch: seconds between two looks.")
    ] = 2.0,
) -> None:
    """One federation, with its clients and its latest rounds."""
    at = connect()
    if as_json:
        typer.echo(at.federation(name).model_dump_json(indent=2))
    elif follow:
        watch(lambda: at.federation(name), lambda view: _shown(at, view), interval_s)
    else:
        view = at.federation(name)
        print_federation(view)
        for table in _tables(at, view):
            print_table(table)


def _shown(at: "Coordinator", view: "FederationView") -> "list[RenderableType]":
    return [*federation_lines(view), *_tables(at, view)]


def _tables(at: "Coordinator", view: "FederationView") -> list[Table]:
    """The clients of a federation and its latest rounds."""
    clients = Table("client", "state", "images", "device", "doing", "trouble", "last seen")
    now, patience_s = at.now(), math.inf if view.plan is None else view.plan.rounds.absent_after_s
    for client in at.clients(view.name):
        state, images = state_cell(client, now, patience_s), str(sum(client.class_counts.values()))
        clients.add_row(client.name, state, images, client.device, *activity_cells(client, now))
    rounds = Table("round", "state", "updates", "accuracy of its model", "missing", "reason")
    last = view.round.number if view.round else view.latest_model
    for round_ in at.rounds(view.name, max(0, last - 10), 20):
        rounds.add_row(
            str(round_.number),
            round_.state,
            f"{round_.updates} of {round_.participants}",
            percent(round_.evaluation.accuracy if round_.evaluation else None),
            missing_cell(round_),
            round_.waiting_for or round_.reason,
        )
    return [clients, rounds]


@app.command()
@on_coordinator
def start(connect: Connect, name: Federation) -> None:
    """Begin, as soon as enough sites have joined."""
    print_federation(connect().change(name, "start"))


@app.command()
@on_coordinator
def pause(connect: Connect, name: Federation) -> None:
    """Pause. No deadline passes until it is resumed."""
    print_federation(connect().change(name, "pause"))


@app.command()
@on_coordinator
def resume(connect: Connect, name: Federation) -> None:
    """Resume after a pause."""
    print_federation(connect().change(name, "resume"))


@app.command()
@on_coordinator
def rollback(
    connect: Connect,
    name: Federation,
    to: Annotated[int, typer.Option(help="The round whose model to go back to; 0 is the start.", min=0, max=2**31 - 1)],
) -> None:
    """Publish an older model again, and pause. The history stays."""
    print_federation(connect().rollback(name, to))


@app.command()
@on_coordinator
def cancel(connect: Connect, name: Federation) -> None:
    """End for good; the models stay."""
    print_federation(connect().change(name, "cancel"))


@app.command()
@on_coordinator
def delete(
    connect: Connect,
    name: Federation,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the name; for scripts.")] = False,
) -> None:
    """Delete a federation that is not running or paused, with its models, history and clients. There is no way back."""
    at = connect()
    view = at.federation(name)
    if not yes and view.state not in ("running", "paused"):  # those are refused
        out.print(
            f"This deletes {name} for good: its models, its history ({view.rounds_done} rounds done) and its clients "
            f"({view.clients} active), whose tokens end.",
            highlight=False,
        )
        if (typed := typer.prompt("Type its name to confirm")) != name:
            raise DistransError(f"{typed!r} is not {name!r}.", next_step="Nothing was deleted.")
    at.delete(name)
    out.print(f"Federation {name} is deleted.")
