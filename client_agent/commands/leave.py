"""`distrans-agent leave`."""

import sys
from typing import Annotated

import typer

from client_agent.commands.options import STATE, State
from client_agent.commands.output import out
from shared.contract.errors import DistransError


def leave(
    state: State = STATE,
    yes: Annotated[bool, typer.Option("--yes", help="Leave without asking for confirmation.")] = False,
) -> None:
    """Leave the federation for good. Past updates still count, and the last model can still be served."""
    from client_agent.coordinator.leaving import REJOIN_ADVICE, leave_federation
    from client_agent.state.folder import StateFolder

    folder = StateFolder(state)
    identity = folder.identity()
    if not yes and not identity.has_left:
        if not sys.stdin.isatty():
            raise DistransError(
                "Leaving cannot be undone, and there is no terminal to confirm it.", next_step="Pass --yes."
            )
        question = f"Leave federation {identity.federation} as {identity.name}? This cannot be undone."
        if not typer.confirm(question):
            raise typer.Exit(1)
    has_just_left = leave_federation(folder)
    out.print(
        f"{identity.name} {'has left' if has_just_left else 'is no longer part of'} {identity.federation}. "
        f"{state} still holds its models: distrans-agent run serves the last one without training. {REJOIN_ADVICE}",
        highlight=False,
    )
