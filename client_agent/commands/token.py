"""`distrans-agent token`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from client_agent.commands.options import STATE, State
from client_agent.commands.output import out
from shared.contract.errors import DistransError
from shared.system.secrets import STDIN, ask_secret, read_secret


def token(
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="File with the new token; - reads standard input (default: ask)."),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Get a new token from the coordinator; the old one must still be valid.")
    ] = False,
    state: State = STATE,
) -> None:
    """Replace this site's token. A running agent picks up the new one."""
    if renew and file is not None:
        raise DistransError("--renew gets its token from the coordinator.", next_step="Leave out --file.")
    from client_agent.coordinator.tokens import renew_token, replace_token
    from client_agent.state.folder import StateFolder

    folder = StateFolder(state)
    if not renew:
        identity = folder.identity()
        found = ask_secret("New token") if file is None and sys.stdin.isatty() else read_secret(file or STDIN)
        replace_token(folder, found or "")
        out.print(f"{identity.name} now uses the new token.", highlight=False)
    elif renew_token(folder):
        out.print("The token was renewed; the old one is no longer valid.")
    else:
        out.print(
            "The token was renewed and saved, but the coordinator could not be reached to confirm it. "
            "The old one becomes invalid once the new one is used."
        )
