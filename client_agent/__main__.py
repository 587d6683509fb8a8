"""`distrans-agent`: the commands, put together."""

from collections.abc import Callable

import typer

from client_agent.commands import join, leave, models, run, status, token
from shared import command_line

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
COMMANDS: tuple[Callable[..., None], ...] = (
    join.join,
    run.run,
    status.status,
    models.predict,
    models.pin,
    models.unpin,
    models.export,
    token.token,
    leave.leave,
)
for command in COMMANDS:
    app.command()(command)


@app.callback()
def program(version: command_line.VersionOption = False) -> None:
    """The agent of a site that takes part in a DisTrans federation."""


def main() -> None:
    """Entry point of the console script."""
    command_line.run(app)


if __name__ == "__main__":
    main()
