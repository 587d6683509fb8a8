"""`distrans-agent status`."""

import json
from typing import Any

import typer
from rich.table import Table

from client_agent.commands.arguments import STATE, Json, State
from client_agent.commands.output import out


def status(state: State = STATE, as_json: Json = False) -> None:
    """Who this agent is, what it serves, and whether joining paid off."""
    from client_agent.state import StateFolder

    folder = StateFolder(state)
    identity = folder.identity()
    rows, report = [line.row() for line in folder.history()], folder.condition()
    served = next((kept.number for kept in folder.choices()), None)
    about: dict[str, Any] = {
        "name": identity.name,
        "federation": identity.federation,
        "coordinator": identity.connection.server,
        "method": identity.plan.method.name,
        "data": identity.data,
        "kept_models": folder.bundle_numbers(),
        "serving": served,
        "pinned": folder.pinned(),
        "ended": report.ended,
        "outcome": report.outcome,
        "troubles": [trouble.model_dump() for trouble in report.troubles],
        "upload_pending": folder.pending() is not None,
        "history": rows,
    }
    if as_json:
        typer.echo(json.dumps(about, indent=2))
        return
    out.print(f"{identity.name} in federation {identity.federation} at {identity.connection.server}", highlight=False)
    if about["pinned"] is not None:
        out.print(f"/predict is pinned to model {about['pinned']}.")
    if report.ended is not None:
        out.print(f"ended: {report.ended}. {report.outcome}", style="red", markup=False, highlight=False)
    for trouble in report.troubles:
        out.print(f"{trouble.kind}: {trouble.message}", style="yellow", markup=False, highlight=False)
    table = Table(
        "model", "global + own offset", "global, no offset", "this site alone", "served", title="Accuracy here"
    )
    for row in rows:
        scores = [row["with_offset"], row["without_offset"], row["local"]]
        cells = ["–" if score is None else f"{score:.1%}" for score in scores]
        table.add_row(str(row["model"]), *cells, "yes" if row["served"] else row["reason"])
    out.print(table)
