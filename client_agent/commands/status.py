"""`distrans-agent status`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from client_agent.commands.options import STATE, Json, State, state_option
from client_agent.commands.output import out
from shared.system.command_line import print_table

if TYPE_CHECKING:
    from client_agent.settings import Identity
    from client_agent.state.folder import StateFolder
    from client_agent.status import StatusSnapshot


def status(state: State = STATE, as_json: Json = False) -> None:
    """Show whether the agent is running, what it serves, and how accurate each model is here."""
    from client_agent.state.folder import StateFolder

    folder = StateFolder(state)
    identity, is_running, report = folder.identity(), folder.is_running(), folder.load_status()
    about: dict[str, Any] = {
        "name": identity.name,
        "federation": identity.federation,
        "coordinator": identity.connection.server,
        "method": identity.plan.method.name,
        "data": identity.data,
        "running": is_running,
        "held_out_images": _held_out_images(folder, report),
        "kept_models": folder.models.numbers(),
        **_serving(folder, report, is_running=is_running),
        "pinned": folder.models.pinned(),
        "pin_problem": folder.models.pin_problem(),
        **_ending(identity, report),
        "troubles": [trouble.model_dump() for trouble in report.troubles],
        "upload_pending": folder.pending() is not None,
        "history": [line.row() for line in folder.models.history()],
    }
    if as_json:
        typer.echo(json.dumps(about, indent=2))
    else:
        _print(about, state)


def _ending(identity: "Identity", report: "StatusSnapshot") -> dict[str, Any]:
    """Return how the last run ended; `leave` counts at once, even if no agent has noticed."""
    from client_agent.settings import HAS_LEFT

    if identity.has_left and report.ended is None:
        return {"ended": "left", "outcome": HAS_LEFT}
    return {"ended": report.ended, "outcome": report.outcome}


def _serving(folder: "StateFolder", report: "StatusSnapshot", *, is_running: bool) -> dict[str, Any]:
    """Return the model that answers, or would answer if the agent ran, and since when."""
    recorded = report.serving
    if is_running:
        return {
            "serving": None if recorded is None else recorded.number,
            "serving_since": None if recorded is None else recorded.since,
        }
    first = folder.models.first_choice()
    is_same = recorded is not None and first is not None and first.holds(recorded.key)
    return {
        "serving": None if first is None else first.key.number,
        "serving_since": recorded.since if recorded is not None and is_same else None,
    }


def _held_out_images(folder: "StateFolder", report: "StatusSnapshot") -> int | None:
    """Return the count from the last run; for an older agent, how many images its last model was measured on."""
    if report.held_out_images is not None:
        return report.held_out_images
    measured = (line.with_offset for line in reversed(folder.models.history()))
    return next((result.samples for result in measured if result is not None), None)


def _print(about: dict[str, Any], state: Path) -> None:
    def line(text: str, style: str | None = None) -> None:
        out.print(text, style=style, markup=False, highlight=False)

    line(f"{about['name']} in federation {about['federation']} at {about['coordinator']}")
    option = state_option(state)
    start = f"The agent is not running. Start it: distrans-agent run{option}"
    line("The agent is running." if about["running"] else start)
    line(_serving_line(about))
    images = about["held_out_images"]
    line("Held-out images: " + ("unknown until the agent opens them" if images is None else str(images)))
    if about["pin_problem"]:
        others = ", ".join(str(number) for number in about["kept_models"] if number != about["pinned"])
        advice = f"Run distrans-agent unpin{option}" + (f", or pin another model: {others}." if others else ".")
        line(f"Model {about['pinned']} is pinned but cannot be served. {about['pin_problem']} {advice}", "yellow")
    elif about["pinned"] is not None:
        line(f"/predict is pinned to model {about['pinned']}.")
    if about["upload_pending"]:
        line("An update is waiting to be uploaded.")
    if about["ended"] is not None:
        line(f"ended: {about['ended']}. {about['outcome']}", "red")
    elif about["outcome"]:
        line(about["outcome"])
    for trouble in about["troubles"]:
        line(f"{trouble['kind']}: {trouble['message']}", "yellow")
    table = Table(
        "model", "global + own offset", "global, no offset", "this site alone", "served", title="Accuracy here"
    )
    for row in about["history"]:
        scores = [row["with_offset"], row["without_offset"], row["local"]]
        cells = ["–" if score is None else f"{score:.1%}" for score in scores]
        table.add_row(str(row["model"]), *cells, "yes" if row["served"] else row["reason"])
    print_table(table)


def _serving_line(about: dict[str, Any]) -> str:
    if about["serving"] is None:
        return "No model is being served." if about["running"] else "There is no model to serve."
    since = about["serving_since"]
    moment = None if since is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
    if about["running"]:
        return f"Serving model {about['serving']}{f' since {moment}' if moment else ''}."
    return f"When started, it will serve model {about['serving']}{f' (first served {moment})' if moment else ''}."
