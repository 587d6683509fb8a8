"""`distrans-lab bench`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lab.commands.options import Device
from shared.system.command_line import examples

app = typer.Typer(no_args_is_help=True, help="Measure speed, as ratios within one run.")


@app.command(epilog=examples("distrans-lab bench train lenet resnet18 --seconds 60"))
def train(
    backbones: Annotated[
        list[str] | None, typer.Argument(metavar="BACKBONE", help="Networks (default: all built-in ones).")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Minimum number of steps of each kind.")] = 9,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Minimum time per backbone, in seconds.")
    ] = 20,
    device: Device = "auto",
) -> None:
    """Measure local training.

    Compares training at 3×64×64 and batch size 32 with a plain implementation that makes two passes.
    """
    from lab.bench.train import run_bench

    run_bench(Console(), backbones, repeats, seconds, device)


@app.command(epilog=examples("distrans-lab bench predict lenet --calls 1000"))
def predict(
    backbones: Annotated[
        list[str] | None, typer.Argument(metavar="BACKBONE", help="Networks (default: lenet and resnet18).")
    ] = None,
    calls: Annotated[
        int, typer.Option(metavar="N", min=10, help="Number of calls, by one caller and again by eight.")
    ] = 400,
) -> None:
    """Measure latency and throughput of /predict.

    Compares it at 64×64 with decoding and a forward pass of the same network alone.
    """
    from lab.bench.predict import run_bench

    run_bench(Console(), backbones, calls)


@app.command(epilog=examples("distrans-lab bench aggregate --size 250 --json mean.json"))
def aggregate(
    size: Annotated[int, typer.Option(metavar="MB", min=1, help="Size of the float32 model, in megabytes.")] = 45,
    updates: Annotated[int, typer.Option(metavar="N", min=1, help="Updates to add, per kind of weights.")] = 40,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write the measurements to.")] = None,
) -> None:
    """Measure the coordinator's running mean.

    Compares it with numpy's sum of the same updates in float64, which is as fast as memory allows but depends on their
    order.
    """
    from lab.bench.aggregate import run_bench

    run_bench(Console(), size, updates, json)


@app.command(epilog=examples("distrans-lab bench poll --clients 1000 --json poll.json"))
def poll(
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="Number of clients that wait.")] = 1000,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to measure idle clients, in seconds.")
    ] = 30,
    db: Annotated[
        str | None, typer.Option(metavar="URL", help="Database to use.", show_default="a new SQLite file")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Measure the cost of waiting clients.

    Compares a coordinator process with a bare web server that holds as many requests: the share of a core while all
    clients wait, and how soon they learn of a new round.
    """
    from lab.bench.poll import run_bench

    run_bench(Console(), clients, seconds, db, json_file)
