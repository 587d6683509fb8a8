"""Options that several commands share."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from shared.contract.errors import DistransError
from shared.system.secrets import read_secret, secret

State = Annotated[
    Path,
    typer.Option(
        "--state",
        envvar="DISTRANS_AGENT_STATE",
        metavar="FOLDER",
        help="The agent's folder: identity, offset, models.",
    ),
]
STATE = Path("distrans-agent")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def state_option(state: Path) -> str:
    """Return the option that a suggested command needs to find the same folder."""
    return "" if state == STATE else f" --state {shlex.quote(str(state))}"


def find_secret(option: str, value: str | None, file: Path | None, variable: str) -> str | None:
    """Return a secret from its option, its file option or the environment; None if none of them is set."""
    if value is not None and file is not None:
        raise DistransError(f"{option} and {option}-file exclude each other.", next_step="Use one of them.")
    if value is not None:
        return value
    return secret(variable) if file is None else read_secret(file)
