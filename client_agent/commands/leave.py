"""`distrans-agent leave`."""

import sys
from typing import Annotated

import typer

from client_agent.commands.arguments import STATE, State
from client_agent.commands.output import out
from shared.problems import DistransError


def leave(
    state: State = STATE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Leave the federation for good. What was uploaded still counts; the last model is still served."""
    from client_agent.credentials import HOW_TO_RETURN, leave_federation
    from client_agent.state import StateFolder

    folder = StateFolder(state)
    identity = folder.identity()
    if not yes and not identity.has_left:
        if not sys.stdin.isatty():
            raise DistransError("Leaving cannot be undone, and nobody is there to confirm it.", next_step="Pass --yes.")
        question = f"Leave federation {identity.federation} as {identity.name}? This cannot be undone."
        if not typer.confirm(question):
            raise typer.Exit(1)
    is_news = leave_federation(folder)
    out.print(
        f"{identity.name} {'has left' if is_news else 'is no longer part of'} {identity.federation}. {state} keeps its "
        f"models: distrans-agent run serves the last one, and trains no more. {HOW_TO_RETURN}",
        highlight=False,
    )
