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

    from shared.schemas import FederationView

_ANY_WIDTH = 100_000
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
    accuracy = "" if view.best_accuracy is None else f", best accuracy {percent(view.best_accuracy)}"
    heterogeneity = "" if view.dh is None else f", DH {percent(view.dh, 0)}"
    rounds = f"{view.rounds_done} of {view.rounds_total} rounds"
    headline = f"{view.name}: {view.state}, {rounds}, {view.clients} clients{heterogeneity}{accuracy}"
    return [headline, *(f"  {line}" for line in (view.waiting_for, view.reason) if line)]


def when(at: float) -> str:
    """A moment, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
