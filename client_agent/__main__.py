"""`distrans-agent`: assembles the commands."""

if __name__ == "__main__":  # `python -m client_agent`: check where packages come from before importing any
    import distrans

    distrans.agent()


import typer

from client_agent.commands import join, leave, models, run, status, token
from shared.system import command_line
from shared.system.command_line import examples

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=command_line.HELP_FLAGS)
app.command(
    epilog=examples(
        "distrans-agent join --server https://fl.example.org --name north --data .",
        "distrans-agent join --server https://fl.example.org --name north \\",
        "    --data images.csv --invite-file invite.txt --skip-bad",
    )
)(join.join)
app.command(
    epilog=examples(
        "distrans-agent run",
        "distrans-agent run --device cuda --precision bf16 --adapt head",
        "distrans-agent run --prior screening.csv",
        "distrans-agent run --host 0.0.0.0 --predict-token-file token.txt \\",
        "    --tls-cert cert.pem --tls-key key.pem",
        "distrans-agent run --no-train",
    )
)(run.run)
app.command(epilog=examples("distrans-agent status --classes", "distrans-agent status --plot classes.png"))(
    status.status
)
app.command(epilog=examples("distrans-agent predict scan.png --top-k 1"))(models.predict)
app.command(epilog=examples("distrans-agent pin 4"))(models.pin)
app.command(epilog=examples("distrans-agent unpin"))(models.unpin)
app.command(epilog=examples("distrans-agent export model.pt2", "distrans-agent export model.safetensors --round 4"))(
    models.export
)
app.command(epilog=examples("distrans-agent token --renew", "distrans-agent token --file token.txt"))(token.token)
app.command(epilog=examples("distrans-agent leave"))(leave.leave)


@app.callback()
def program(version: command_line.VersionOption = False) -> None:
    """Take part in a DisTrans federation: train on this site's images and serve predictions."""


def main() -> None:
    """Run the console script."""
    command_line.run(app)
