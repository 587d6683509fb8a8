"""`distrans-agent token`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from client_agent.commands.arguments import STATE, State
from client_agent.commands.output import out
from shared.environment import STDIN, ask_secret, read_secret
from shared.problems import DistransError


def token(
    file: Annotated[
        Path | None,
        typer.Option("--file", help="File that holds the new token; - reads the standard input. Default: ask for it."),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Ask the coordinator for a new token; the old one must still be valid.")
    ] = False,
    state: State = STATE,
) -> None:
    """Use another token of this site from now on, such as after a rotation; a running agent picks it up."""
    if renew and file is not None:
        raise DistransError("--renew gets a token from the coordinator.", next_step="Leave out --file.")
    from client_agent.credentials import renew_token, replace_token
    from client_agent.state import StateFolder

    folder = StateFolder(state)
    if not renew:
        identity = folder.identity()
        found = ask_secret("New token") if file is None and sys.stdin.isatty() else read_secret(file or STDIN)
        replace_token(folder, found or "")
        out.print(f"{identity.name} uses the new token.", highlight=False)
    elif renew_token(folder):
        out.print("The coordinator has renewed the token; the old one has ended.")
    else:
        out.print(
            "The token is renewed and saved. The coordinator cannot be reached to confirm it; the old one ends then."
        )
