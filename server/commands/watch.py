"""`federation show --watch`: the federation again and again, until it has ended."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.commands.output import folded, percent, when
from shared.problems import DistransError

if TYPE_CHECKING:
    from shared.schemas import FederationView

_ENDED = ("finished", "cancelled")


def watch(
    look: "Callable[[], FederationView]",
    show: "Callable[[FederationView], list[RenderableType]]",
    interval_s: float,
) -> None:
    """Refresh in place on a terminal; print one line per change in a pipe. Waits for a coordinator that is away."""
    try:
        if sys.stdout.isatty():
            _refresh(look, show, interval_s)
        else:
            _print_changes(look, interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _refresh(
    look: "Callable[[], FederationView]",
    show: "Callable[[FederationView], list[RenderableType]]",
    interval_s: float,
) -> None:
    shown: list[RenderableType] = []
    with Live(console=Console(markup=False, emoji=False), auto_refresh=False) as live:
        while True:
            has_ended = False
            try:
                view = look()
                shown, trouble = [_plain(part) for part in show(view)], ""
                has_ended = view.state in _ENDED
            except DistransError as error:
                trouble = _passing(error)
            live.update(Group(*shown, *([Text(trouble)] if trouble else [])), refresh=True)
            if has_ended:
                return
            time.sleep(interval_s)


def _plain(part: RenderableType) -> RenderableType:
    if isinstance(part, str):
        return Text(part)
    return folded(part) if isinstance(part, Table) else part


def _print_changes(look: "Callable[[], FederationView]", interval_s: float) -> None:
    before = ""
    while True:
        has_ended = False
        try:
            view = look()
            line, has_ended = describe(view), view.state in _ENDED
        except DistransError as error:
            line = _passing(error)
        if line != before:
            typer.echo(f"{when(time.time())} {line}")
            before = line
        if has_ended:
            return
        time.sleep(interval_s)


def _passing(error: DistransError) -> str:
    """The message of an error that may pass by itself; any other ends the command."""
    if error.code != "unreachable":
        raise error
    return f"{error.message} Trying again."


def describe(view: "FederationView") -> str:
    """What is worth a line when it changes, so nothing that counts down."""
    parts = [
        f"{view.name}: {view.state}",
        f"{view.rounds_done} of {view.rounds_total} rounds",
        f"{view.clients} clients",
    ]
    if view.round is not None:
        landed = f"{view.round.updates} of {view.round.participants} updates"
        parts.append(f"round {view.round.number} {view.round.state} with {landed}")
    if view.best_accuracy is not None:
        parts.append(f"best accuracy {percent(view.best_accuracy)}")
    return ", ".join(parts) + (f": {view.reason}" if view.reason else "")
