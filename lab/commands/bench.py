"""`distrans-lab bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from lab.commands.options import Device
from shared.contract.errors import DistransError
from shared.system.command_line import examples

Number = TypeVar("Number", int, float)
_LARGEST = 1_000_000
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all measurements to this file.")]
app = typer.Typer(no_args_is_help=True, help="Measure speed, as ratios within one run.")


@app.command(epilog=examples("distrans-lab bench train lenet resnet50 --seconds 60 --plot train.png"))
def train(
    backbones: Annotated[
        list[str] | None, typer.Argument(metavar="BACKBONE", help="Networks (default: lenet and resnet18).")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Minimum number of passes of each kind.")] = 3,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Minimum time per backbone, in seconds.")
    ] = 20,
    images: Annotated[int, typer.Option(metavar="N", min=32, help="Images per pass.")] = 256,
    threads: Annotated[
        int | None,
        typer.Option(metavar="THREADS", min=1, help="CPU threads (default: the fastest number, measured first)."),
    ] = None,
    device: Device = "auto",
    json: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot of the ratios: .png, .svg or .pdf.")] = None,
) -> None:
    """Measure local training.

    Compares an agent's training at 3×64×64 and batch size 32 with the authors' loop written out: images decoded and
    transformed one by one, one pass through the network per channel. Both read the same files with the same threads.
    """
    from lab.bench.train import DEFAULT_BACKBONES, TrainOptions, run_bench

    chosen = tuple(backbones or DEFAULT_BACKBONES)
    run_bench(Console(), TrainOptions(chosen, repeats, seconds, images, threads, device, json, plot))


PeersFolder = Annotated[
    Path | None,
    typer.Option(
        "--peers", metavar="DIR", help="Folder for peers' environments (default: distrans/peers in your cache)."
    ),
]


@app.command(
    epilog=examples(
        "distrans-lab bench predict lenet --calls 2000", "distrans-lab bench predict --with-litserve --plot predict.png"
    )
)
def predict(
    backbones: Annotated[
        list[str] | None, typer.Argument(metavar="BACKBONE", help="Networks (default: lenet and resnet18).")
    ] = None,
    callers: Annotated[str, typer.Option(metavar="N,…", help="Numbers of callers.")] = "1,8,32",
    calls: Annotated[
        int,
        typer.Option(
            metavar="N", min=10, help="Calls per network, number of callers, and server; at least ten per caller."
        ),
    ] = 1000,
    with_litserve: Annotated[
        bool, typer.Option("--with-litserve", help="Measure LitServe beside it; installs it the first time.")
    ] = False,
    peers: PeersFolder = None,
    json: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot of throughput and latency: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure latency, throughput and processor time of /predict.

    Compares it with a loop that decodes the same image and runs the same network: the model with its offset, and a
    blend of four models.
    """
    numbers = _numbers(callers, int, "--callers")
    from lab.bench.predict import PredictOptions, run_bench

    networks = backbones or ["lenet", "resnet18"]
    run_bench(
        Console(),
        PredictOptions(networks, numbers, calls, with_litserve=with_litserve, peers=peers, json=json, plot=plot),
    )


@app.command(epilog=examples("distrans-lab bench aggregate --size 250 --json mean.json"))
def aggregate(
    size: Annotated[int, typer.Option(metavar="MB", min=1, help="Size of the float32 model, in megabytes.")] = 45,
    updates: Annotated[int, typer.Option(metavar="N", min=1, help="Updates to add, per kind of weights.")] = 40,
    json: JsonFile = None,
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
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="Database to use.", show_default="a new SQLite file")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Measure the cost of waiting clients.

    Compares a coordinator process with a bare web server that holds as many requests: the share of a core while all
    clients wait, and how soon they learn of a new round.
    """
    from lab.bench.poll import run_bench

    run_bench(Console(), clients, seconds, database, json)


@app.command(
    name="round",
    epilog=examples(
        "distrans-lab bench round --clients 10,40 --megabytes 4.35 --plot round.png",
        "distrans-lab bench round --database postgresql://postgres@localhost/postgres",
        "distrans-lab bench round --with-flower --json round.json",
    ),
)
def round_(
    clients: Annotated[str, typer.Option(metavar="N,…", help="Numbers of clients.")] = "10,40,100",
    megabytes: Annotated[str, typer.Option(metavar="MB,…", help="Sizes of the model, in 10⁶ bytes.")] = "4.35,44.8",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds per size; the first one is the warm-up.")] = 3,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="PostgreSQL server; gets a new database, which is dropped afterward (default: SQLite).",
        ),
    ] = None,
    blobs: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Place for tensor bytes, as in DISTRANS_BLOBS; gets a prefix of its own."),
    ] = None,
    with_flower: Annotated[
        bool, typer.Option("--with-flower", help="Measure Flower beside it; installs it the first time.")
    ] = False,
    peers: PeersFolder = None,
    json: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot of seconds over clients × bytes: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure rounds of clients that do everything but train.

    Compares a real coordinator with the same bytes over bare sockets, one sum and one file.
    """
    numbers = _numbers(clients, int, "--clients")
    sizes = _numbers(megabytes, float, "--megabytes")
    from lab.bench.round import RoundOptions, run_bench

    run_bench(Console(), RoundOptions(numbers, sizes, rounds, database, blobs, with_flower, peers, json, plot))


@app.command(name="bytes", epilog=examples("distrans-lab bench bytes lenet resnet18"))
def bytes_(
    backbones: Annotated[
        list[str] | None, typer.Argument(metavar="BACKBONE", help="Networks (default: all built-in ones).")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Count the bytes that each method sends.

    Encodes the messages of a round and compares them with the network's float32 weights, without training.
    """
    from lab.bench.message_bytes import run_bench

    run_bench(Console(), backbones, json)


def _numbers(text: str, kind: Callable[[str], Number], option: str) -> list[Number]:
    """Parse a list of positive numbers separated by commas."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < _LARGEST for number in numbers):
        raise DistransError(
            f"{option} is {text!r}; it must be positive numbers, separated by commas.",
            next_step=f"Example: {option} 10,40",
        )
    return list(dict.fromkeys(numbers))
