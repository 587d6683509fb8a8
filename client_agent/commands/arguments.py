"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

State = Annotated[
    Path, typer.Option("--state", envvar="DISTRANS_AGENT_STATE", help="The agent's folder: identity, offset, models.")
]
STATE = Path("distrans-agent")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
