"""`distrans-server`: the commands, put together."""

import typer

from server.commands import archive, audit, client, db, federation, invite, serve
from shared.command_line import VersionOption, run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(serve.serve)
app.add_typer(db.app, name="db")
app.add_typer(federation.app, name="federation")
federation.app.command()(archive.export)
federation.app.command("import")(archive.import_)
app.add_typer(invite.app, name="invite")
app.add_typer(client.app, name="client")
app.add_typer(audit.app, name="audit")

# What to do about an error, in the words of this program; the API has its own.
NEXT_STEPS = {
    "no-such-federation": "Run: distrans-server federation list",
    "invalid-token": "Check DISTRANS_ADMIN_TOKEN, or the file that --admin-token-file names.",
    "no-such-invite": "Run: distrans-server invite list FEDERATION",
    "no-such-client": "Run: distrans-server client list FEDERATION",
}


@app.callback()
def program(version: VersionOption = False) -> None:
    """The coordinator of DisTrans federations."""


def main() -> None:
    """Entry point of the console script."""
    run(app, NEXT_STEPS)


if __name__ == "__main__":
    main()
