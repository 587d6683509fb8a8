"""`distrans-agent status`."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from client_agent.commands.class_report import describe_scores, percent, plot_classes, print_classes
from client_agent.commands.options import STATE, Json, State, state_option
from client_agent.commands.output import out
from shared.contract.errors import DistransError
from shared.system.command_line import print_table

if TYPE_CHECKING:
    from client_agent.settings import Identity
    from client_agent.state.folder import StateFolder
    from client_agent.state.records import SiteReport
    from client_agent.status import StatusSnapshot


def status(
    state: State = STATE,
    as_json: Json = False,
    classes: Annotated[
        bool, typer.Option("--classes", help="Also show how each class is recognized, and what is confused with what.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw that as well, as a .png, .pdf or .svg file.")
    ] = None,
) -> None:
    """Show whether the agent is running, what it serves, whether joining pays off, and how accurate models are here."""
    from client_agent.state.folder import StateFolder
    from client_agent.state.records import describe_findings

    folder = StateFolder(state)
    identity, is_running, report = folder.identity(), folder.is_running(), folder.load_status()
    serving, findings = _serving(folder, report, is_running=is_running)
    about: dict[str, Any] = {
        "name": identity.name,
        "federation": identity.federation,
        "coordinator": identity.connection.server,
        "method": identity.plan.method.name,
        "data": identity.data,
        "running": is_running,
        "held_out_images": _held_out_images(folder, report),
        "held_out": None if report.holdout is None else report.holdout.model_dump(),
        "kept_models": folder.models.numbers(),
        **serving,
        "pinned": folder.models.pinned(),
        "pin_problem": folder.models.pin_problem(),
        **_ending(identity, report),
        "troubles": [trouble.model_dump() for trouble in report.troubles],
        "upload_pending": folder.pending() is not None,
        **describe_findings(findings),
        "history": [line.row() for line in folder.models.history()],
    }
    if as_json:
        typer.echo(json.dumps(about, indent=2))
    else:
        _print(about, state, report, findings)
        if classes:
            print_classes(findings)
    if plot is not None:
        plot_classes(findings, plot, f"{identity.name}: model {about['serving']} as {about['candidate']}")
        if not as_json:
            out.print(f"Wrote {plot}.", highlight=False)


def _ending(identity: "Identity", report: "StatusSnapshot") -> dict[str, Any]:
    """Return how the last run ended; `leave` counts at once, even if no agent has noticed."""
    from client_agent.settings import HAS_LEFT

    if identity.has_left and report.ended is None:
        return {"ended": "left", "outcome": HAS_LEFT}
    return {"ended": report.ended, "outcome": report.outcome}


def _serving(
    folder: "StateFolder", report: "StatusSnapshot", *, is_running: bool
) -> tuple[dict[str, Any], "SiteReport | None"]:
    """Return what answers, or would answer if the agent ran, since when, and how well it does."""
    recorded, models = report.serving, folder.models
    if is_running:
        number, since = (None, None) if recorded is None else (recorded.number, recorded.since)
        kept = next((one for one in models.all() if recorded is not None and one.holds(recorded.key)), None)
        record = "" if recorded is None else recorded.record
    else:
        kept = models.first_choice()
        record = "" if kept is None else models.record_name(kept)
        number = None if kept is None else kept.key.number
        is_same = recorded is not None and kept is not None and kept.holds(recorded.key) and recorded.record == record
        since = recorded.since if recorded is not None and is_same else None
    found = None
    if kept is not None and record:
        with suppress(DistransError):  # damaged; a running agent still has it in memory
            found = kept.candidates.load(record)
    about = {"serving": number, "serving_since": since, "candidate": None if found is None else found.name}
    return about, None if found is None else found.report


def _held_out_images(folder: "StateFolder", report: "StatusSnapshot") -> int | None:
    """Return the count from the last run; for an older agent, how many images its last model was measured on."""
    if report.held_out_images is not None:
        return report.held_out_images
    measured = (line.with_offset for line in reversed(folder.models.history()))
    return next((result.samples for result in measured if result is not None), None)


def _print(about: dict[str, Any], state: Path, report: "StatusSnapshot", findings: "SiteReport | None") -> None:
    def line(text: str, style: str | None = None) -> None:
        out.print(text, style=style, markup=False, highlight=False)

    line(f"{about['name']} in federation {about['federation']} at {about['coordinator']}")
    option = state_option(state)
    start = f"The agent is not running. Start it: distrans-agent run{option}"
    line("The agent is running." if about["running"] else start)
    line(_serving_line(about))
    if findings is not None:
        for text in describe_scores(findings):
            line(text)
    images = "unknown until the agent opens them" if about["held_out_images"] is None else about["held_out_images"]
    line(f"Held-out images: {images if report.holdout is None else report.holdout}")
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
    headings = ["global + own offset", "global, no offset", "this site alone", "best candidate", "tested", "served"]
    table = Table("model", *headings, title="Accuracy here")
    for row in about["history"]:
        scores = [row["with_offset"], row["without_offset"], row["local"]]
        cells = [percent(score) for score in scores] + [row["candidate"] or "–", percent(row["test"])]
        table.add_row(str(row["model"]), *cells, "yes" if row["served"] else row["reason"])
    print_table(table)


def _serving_line(about: dict[str, Any]) -> str:
    if about["serving"] is None:
        return "No model is being served." if about["running"] else "There is no model to serve."
    since, name = about["serving_since"], f" as {about['candidate']}" if about["candidate"] else ""
    moment = None if since is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
    if about["running"]:
        return f"Serving model {about['serving']}{name}{f' since {moment}' if moment else ''}."
    return f"When started, it will serve model {about['serving']}{name}{f' (first served {moment})' if moment else ''}."
