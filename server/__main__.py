"""`distrans-server`."""

import typer

from shared.command_line import VersionOption, run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def program(version: VersionOption = False) -> None:
    """The coordinator of a DisTrans federation."""


def main() -> None:
    """Entry point of the console script."""
    run(app)


if __name__ == "__main__":
    main()
