"""How commands print federations, clients and rounds."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from pydantic import BaseModel

    from shared.contract.messages import ClientView, FederationView, RoundView

_MISSING_SHOWN = 5
out = Console(soft_wrap=True, markup=False, emoji=False)  # sites choose some of the text, so it is not markup


def print_json(views: "Iterable[BaseModel]") -> None:
    """Print the views as one JSON array."""
    typer.echo(json.dumps([view.model_dump(mode="json") for view in views]))


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share as a percentage, or as a dash for None."""
    return "–" if share is None else f"{share:.{digits}%}"


def print_federation(view: "FederationView") -> None:
    """Print a federation's state and what it is waiting for."""
    for line in federation_lines(view):
        out.print(line, highlight=False)


def federation_lines(view: "FederationView") -> list[str]:
    """Return a headline, then what the federation is waiting for and why, and whether it has converged."""
    accuracy = ""
    if view.best_accuracy is not None:
        accuracy = f", best accuracy {percent(view.best_accuracy)} (model {view.best_model})"
    heterogeneity = "" if view.dh is None else f", DH {percent(view.dh, 0)}"
    rounds = f"{view.rounds_done} of {view.rounds_total} rounds"
    headline = f"{view.name}: {view.state}, {rounds}, {view.clients} clients{heterogeneity}{accuracy}"
    advice = view.more_rounds and f"not converged; about {view.more_rounds} more rounds would help"
    return [headline, *(f"  {line}" for line in (view.waiting_for, view.reason, advice) if line)]


def format_time(at: float) -> str:
    """Format a timestamp in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def format_bytes(size: int) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def activity_cells(client: "ClientView", now: float) -> tuple[str, str, str]:
    """Return what a client's agent is doing, its trouble, and how long ago it was last seen."""
    from server.core.lifecycle import format_duration

    seen = f"{format_duration(max(0, now - client.last_seen_at))} ago"
    if client.state != "active":
        return "–", "–", seen
    return client.activity_detail or client.activity or "not reported", trouble_text(client) or "–", seen


def images_cell(client: "ClientView") -> str:
    """Return a client's number of training images."""
    return str(sum(client.class_counts.values())) if client.class_counts else "withheld"


def trouble_text(client: "ClientView") -> str:
    """Return the messages of a client's trouble; empty without any."""
    return " ".join(trouble.message for trouble in client.troubles) if client.state == "active" else ""


def state_cell(client: "ClientView", now: float, patience_s: float) -> str:
    """Return a client's state; `absent` if it is active but silent for longer than its federation waits."""
    is_absent = client.state == "active" and now - client.last_seen_at >= patience_s
    return "absent" if is_absent else client.state


def missing_cell(round_: "RoundView") -> str:
    """Return which clients are missing in a round and why, one per line; rounds record that when they close."""
    lines = [f"{one.client}: {one.reason}" for one in round_.missing[:_MISSING_SHOWN]]
    if more := len(round_.missing) - len(lines):
        lines.append(f"and {more} more")
    if round_.state == "open" and round_.updates < round_.participants:
        lines.append(f"{round_.participants - round_.updates} have not uploaded yet")
    return "\n".join(lines) or "–"
