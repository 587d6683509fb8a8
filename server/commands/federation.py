"""`distrans-server federation`: create, list, show, and the changes of state."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from server.commands.arguments import DATA, DataDir, Db, Federation, Json
from server.commands.output import activity_cells, missing_cell, out, percent, print_federation, print_json, print_table
from server.commands.place import open_context, operator
from shared.problems import DistransError

app = typer.Typer(
    no_args_is_help=True,
    help="Create, look at, start, pause, resume, cancel, roll back, export and import federations.",
)


@app.command()
def create(
    plan: Annotated[Path | None, typer.Argument(help="The plan, a TOML file.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented plan and exit.")] = False,
    weights: Annotated[Path | None, typer.Option(help="Initial weights, for model.weights = 'file'.")] = None,
    data_dir: DataDir = DATA,
    db: Db = None,
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
        raise DistransError(f"{plan} is not a text in UTF-8.") from error
    from server.service import federations

    federations.create(open_context(db, data_dir), operator(), parsed, weights)
    out.print(f"Federation {parsed.name} created. Next: distrans-server invite {parsed.name}")


@app.command("list")
def list_(data_dir: DataDir = DATA, db: Db = None, as_json: Json = False) -> None:
    """All federations."""
    from server.service import federations

    views = federations.list_all(open_context(db, data_dir))
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
def show(name: Federation, data_dir: DataDir = DATA, db: Db = None, as_json: Json = False) -> None:
    """One federation, with its clients and its latest rounds."""
    from server.service import enrolment, federations, reports

    ctx = open_context(db, data_dir)
    view = federations.show(ctx, name)
    if as_json:
        typer.echo(view.model_dump_json(indent=2))
        return
    print_federation(view)
    clients = Table("client", "state", "images", "device", "doing", "trouble", "last seen")
    for client in enrolment.clients_of(ctx, name):
        images = str(sum(client.class_counts.values()))
        clients.add_row(client.name, client.state, images, client.device, *activity_cells(client, ctx.clock()))
    print_table(clients)
    rounds = Table("round", "state", "updates", "accuracy of its model", "missing", "reason")
    last = view.round.number if view.round else view.latest_model
    for round_ in reports.rounds(ctx, name, None, max(0, last - 10), 20):
        rounds.add_row(
            str(round_.number),
            round_.state,
            f"{round_.updates} of {round_.participants}",
            percent(round_.evaluation.accuracy if round_.evaluation else None),
            missing_cell(round_),
            round_.waiting_for or round_.reason,
        )
    print_table(rounds)


def _change(action: str, name: str, data_dir: Path, db: str | None) -> None:
    from server.service import federations

    ctx = open_context(db, data_dir)
    getattr(federations, action)(ctx, operator(), name)
    print_federation(federations.show(ctx, name))


@app.command()
def start(name: Federation, data_dir: DataDir = DATA, db: Db = None) -> None:
    """Begin, as soon as enough sites have joined."""
    _change("start", name, data_dir, db)


@app.command()
def pause(name: Federation, data_dir: DataDir = DATA, db: Db = None) -> None:
    """Pause. No deadline passes until it is resumed."""
    _change("pause", name, data_dir, db)


@app.command()
def resume(name: Federation, data_dir: DataDir = DATA, db: Db = None) -> None:
    """Go on after a pause."""
    _change("resume", name, data_dir, db)


@app.command()
def rollback(
    name: Federation,
    to: Annotated[int, typer.Option(help="The round whose model to go back to; 0 is the start.", min=0)],
    data_dir: DataDir = DATA,
    db: Db = None,
) -> None:
    """Publish an older model again, and pause; the rounds in between stay in the history."""
    from server.service import federations, models

    ctx = open_context(db, data_dir)
    models.roll_back(ctx, operator(), name, to)
    print_federation(federations.show(ctx, name))


@app.command()
def cancel(name: Federation, data_dir: DataDir = DATA, db: Db = None) -> None:
    """End for good; the models stay."""
    _change("cancel", name, data_dir, db)
