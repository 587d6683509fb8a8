"""`distrans-lab`. Heavy imports stand inside the commands, so that `--help` answers at once."""

from typing import Annotated

import typer
from rich.console import Console

from shared.command_line import VersionOption, run

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed, as ratios within one run.")
app.add_typer(bench_app, name="bench")


@app.callback()
def program(version: VersionOption = False) -> None:
    """Experiments with DisTrans federations on one machine."""


@app.command()
def demo(
    clients: Annotated[int, typer.Option(min=1, max=50, help="Number of sites.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds of the federation.")] = 15,
    dh: Annotated[float, typer.Option(min=0, max=1, help="Heterogeneity of the sites' classes, 0 … 1.")] = 0.6,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
) -> None:
    """Run a small federation on scikit-learn's digits in memory and compare it with FedAvg."""
    from lab.demo import run_demo

    run_demo(Console(), clients, rounds, dh, seed)


@bench_app.command("train")
def bench_train(
    backbones: Annotated[list[str] | None, typer.Argument(help="Default: all built-in ones.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each kind.")] = 15,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Images per second of local training at 3×64×64, batch 32, against a plain two-pass implementation."""
    from lab.bench_train import run_bench

    run_bench(Console(), backbones, repeats, device)


def main() -> None:
    """Entry point of the console script."""
    run(app)


if __name__ == "__main__":
    main()
