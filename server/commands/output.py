"""How commands print."""

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pydantic import BaseModel

    from shared.schemas import ClientView, FederationView, RoundView

_ANY_WIDTH = 100_000
_MISSING_SHOWN = 5
out = Console(soft_wrap=True, markup=False, emoji=False)  # sites choose some of the texts; they are no markup


def print_table(table: Table) -> None:
    """Folded to fit a terminal; whole, however wide, in a pipe or a file."""
    width = None if sys.stdout.isatty() else _ANY_WIDTH
    Console(markup=False, emoji=False, width=width).print(folded(table))


def folded(table: Table) -> Table:
    """The same table, whose texts are folded where a terminal is too narrow, never cut."""
    for column in table.columns:
        column.overflow = "fold"
    return table


def print_json(views: "Iterable[BaseModel]") -> None:
    """One JSON array."""
    typer.echo(json.dumps([view.model_dump(mode="json") for view in views]))


def percent(share: float | None, digits: int = 1) -> str:
    """A share, or a dash for none."""
    return "–" if share is None else f"{share:.{digits}%}"


def print_federation(view: "FederationView") -> None:
    """A federation in a few lines."""
    for line in federation_lines(view):
        out.print(line, highlight=False)


def federation_lines(view: "FederationView") -> list[str]:
    """A federation and what it waits for."""
    accuracy = ""
    if view.best_accuracy is not None:
        accuracy = f", best accuracy {percent(view.best_accuracy)} (model {view.best_model})"
    heterogeneity = "" if view.dh is None else f", DH {percent(view.dh, 0)}"
    rounds = f"{view.rounds_done} of {view.rounds_total} rounds"
    headline = f"{view.name}: {view.state}, {rounds}, {view.clients} clients{heterogeneity}{accuracy}"
    return [headline, *(f"  {line}" for line in (view.waiting_for, view.reason) if line)]


def when(at: float) -> str:
    """A moment, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def activity_cells(client: "ClientView", now: float) -> tuple[str, str, str]:
    """What a client's agent is doing, what troubles it, and how long ago it was last seen."""
    if client.state != "active":
        return "–", "–", _ago(now - client.last_seen_at)
    troubles = " ".join(trouble.message for trouble in client.troubles)
    return client.activity_detail or client.activity or "not reported", troubles or "–", _ago(now - client.last_seen_at)


def state_cell(client: "ClientView", now: float, patience_s: float) -> str:
    """A client's state; `absent` for an active one that has been silent for longer than its federation waits."""
    is_absent = client.state == "active" and now - client.last_seen_at >= patience_s
    return "absent" if is_absent else client.state


def missing_cell(round_: "RoundView") -> str:
    """Who is missing in a round and why, a line each."""
    lines = [f"{one.client}: {one.reason}" for one in round_.missing[:_MISSING_SHOWN]]
    if more := len(round_.missing) - len(lines):
        lines.append(f"and {more} more")
    return "\n".join(lines) or "–"


def _ago(seconds: float) -> str:
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"
