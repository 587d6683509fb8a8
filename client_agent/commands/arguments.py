"""Options that several commands share."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

State = Annotated[
    Path, typer.Option("--state", envvar="DISTRANS_AGENT_STATE", help="The agent's folder: identity, offset, models.")
]
STATE = Path("distrans-agent")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run_command(state: Path) -> str:
    """The command that starts the agent of this folder, for a person to paste."""
    return "distrans-agent run" + ("" if state == STATE else f" --state {shlex.quote(str(state))}")
