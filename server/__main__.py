"""`distrans-server`: assembles the commands."""

if __name__ == "__main__":  # `python -m server`: check where packages come from before importing any
    import distrans

    distrans.server()

import typer

from server.commands import archive, audit, client, db, federation, invite, serve
from shared.system.command_line import HELP_FLAGS, VersionOption, examples, run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP_FLAGS)
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.add_typer(db.app, name="db")
app.add_typer(federation.app, name="federation")
federation.app.command(epilog=examples("distrans-server federation export lung lung.zip"))(archive.export)
federation.app.command(
    "import",
    epilog=examples(
        "distrans-server federation import lung.zip", "distrans-server federation import lung.zip --name lung-2"
    ),
)(archive.import_)
app.add_typer(invite.app, name="invite")
app.add_typer(client.app, name="client")
app.add_typer(audit.app, name="audit")

# Next steps by error code, for errors that do not come with one; the API has its own.
NEXT_STEPS = {
    "no-such-federation": "Run: distrans-server federation list",
    "invalid-token": "Check DISTRANS_ADMIN_TOKEN, or the file in --admin-token-file.",
    "no-such-invite": "Run: distrans-server invite list FEDERATION",
    "no-such-client": "Run: distrans-server client list FEDERATION",
}


@app.callback()
def program(version: VersionOption = False) -> None:
    """Run and manage the coordinator of DisTrans federations."""


def main() -> None:
    """Run the console script."""
    run(app, NEXT_STEPS)
