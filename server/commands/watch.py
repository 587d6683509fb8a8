"""`federation show --watch`: shows a federation repeatedly until it has ended."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.commands.output import format_time, percent, trouble_text
from shared.contract.errors import DistransError
from shared.system.command_line import fold_cells

if TYPE_CHECKING:
    from server.commands.coordinator import Coordinator
    from shared.contract.messages import ClientView, FederationView


def watch(
    coordinator: "Coordinator",
    name: str,
    show: "Callable[[FederationView], list[RenderableType]]",
    interval_s: float,
) -> None:
    """Refresh in place on a terminal, or print one line per change when piped. Wait while the coordinator is down."""
    try:
        if sys.stdout.isatty():
            _refresh(coordinator, name, show, interval_s)
        else:
            _print_changes(coordinator, name, interval_s)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _refresh(
    coordinator: "Coordinator",
    name: str,
    show: "Callable[[FederationView], list[RenderableType]]",
    interval_s: float,
) -> None:
    shown: list[RenderableType] = []
    with Live(console=Console(markup=False, emoji=False), auto_refresh=False) as live:
        while True:
            ended = False
            try:
                view = coordinator.federation(name)
                shown, trouble = [_plain(part) for part in show(view)], ""
                ended = _has_ended(view)
            except DistransError as error:
                trouble = _transient_message(error)
            live.update(Group(*shown, *([Text(trouble)] if trouble else [])), refresh=True)
            if ended:
                return
            time.sleep(interval_s)


def _plain(part: RenderableType) -> RenderableType:
    if isinstance(part, str):
        return Text(part)
    return fold_cells(part) if isinstance(part, Table) else part


def _print_changes(coordinator: "Coordinator", name: str, interval_s: float) -> None:
    line, troubles = "", dict[str, str]()
    while True:
        before, ended = line, False
        try:
            view = coordinator.federation(name)
            line, ended = summary_line(view), _has_ended(view)
            changes = list(describe_troubles(coordinator.clients(name), troubles))
        except DistransError as error:
            line, changes = _transient_message(error), []
        for change in [line, *changes] if line != before else changes:
            typer.echo(f"{format_time(time.time())} {change}")
        if ended:
            return
        time.sleep(interval_s)


def _has_ended(view: "FederationView") -> bool:
    from server.core.lifecycle import ENDED

    return view.state in ENDED


def _transient_message(error: DistransError) -> str:
    """Return the message of an error that may pass; raise any other."""
    if error.code != "unreachable":
        raise error
    return f"{error.message} Trying again."


def summary_line(view: "FederationView") -> str:
    """Summarize a federation in one line, without anything that counts down."""
    parts = [
        f"{view.name}: {view.state}",
        f"{view.rounds_done} of {view.rounds_total} rounds",
        f"{view.clients} clients",
    ]
    if view.round is not None:
        uploaded = f"{view.round.updates} of {view.round.participants} updates"
        parts.append(f"round {view.round.number} {view.round.state} with {uploaded}")
    if view.best_accuracy is not None:
        parts.append(f"best accuracy {percent(view.best_accuracy)}")
    return ", ".join(parts) + (f": {view.reason}" if view.reason else "")


def describe_troubles(clients: "list[ClientView]", known: dict[str, str]) -> Iterator[str]:
    """Yield a line for each client whose trouble is new, different or over; remember it in `known`."""
    for client in clients:
        text = trouble_text(client)
        if text != known.get(client.name, ""):
            known[client.name] = text
            yield f"client {client.name}: {text or 'no more trouble'}"
