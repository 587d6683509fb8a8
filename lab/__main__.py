"""`distrans-lab`: assembles the commands."""

if __name__ == "__main__":  # `python -m lab`: check where packages come from before importing any
    import distrans

    distrans.lab()


import typer

from lab.commands import bench, demo, experiments
from shared.system import command_line
from shared.system.command_line import examples

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=command_line.HELP_FLAGS)
app.command(
    epilog=examples(
        "distrans-lab demo",
        "distrans-lab demo --clients 10 --dh 0.8 --method fedavg --rounds 30",
        "distrans-lab demo --plan my-plan.toml --keep",
    )
)(demo.demo)
app.command(epilog=examples("distrans-lab split sklearn:digits ten-sites --clients 10 --dh 0.8"))(demo.split)
app.command(
    epilog=examples(
        "distrans-lab run table1 --scale small --engine processes --workers 2",
        "distrans-lab run mine.toml --only dh=0.8 --only method=FedAvg",
    )
)(experiments.run)
app.command(epilog=examples("distrans-lab report table1", "distrans-lab report lab-results/table1-small"))(
    experiments.report
)
app.add_typer(bench.app, name="bench")


@app.callback()
def program(version: command_line.VersionOption = False) -> None:
    """Run experiments with DisTrans federations on one machine."""


def main() -> None:
    """Run the console script."""
    command_line.run(app)
