"""`distrans-lab`. Heavy imports stand inside the commands, so that `--help` answers at once."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from shared.command_line import VersionOption, run
from shared.method_options import MethodOptions
from shared.problems import DistransError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed, as ratios within one run.")
app.add_typer(bench_app, name="bench")
METHOD_NAMES = ", ".join(options.model_fields["name"].default for options in get_args(get_args(MethodOptions)[0]))
SOURCES = "a folder with one folder per class, .csv, .npz, sklearn:digits or torchvision:NAME:ROOT"
Dh = Annotated[
    float, typer.Option(min=0, max=1, help="How much the sites' classes differ: 0, all alike, to 1, none in common.")
]


@app.callback()
def program(version: VersionOption = False) -> None:
    """Experiments with DisTrans federations on one machine."""


@app.command()
def demo(
    clients: Annotated[int, typer.Option(min=1, max=50, help="Number of sites.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds of the federation.")] = 12,
    dh: Dh = 0.6,
    method: Annotated[str, typer.Option(help=f"How the sites learn together: {METHOD_NAMES}.")] = "distrans",
    backbone: Annotated[str, typer.Option(help="The network: lenet, alexnet, resnet18 or resnet50.")] = "lenet",
    data: Annotated[str, typer.Option(help=f"Images to share out: {SOURCES}.")] = "sklearn:digits",
    plan: Annotated[
        Path | None, typer.Option(help="A plan of your own, in place of --rounds, --method and --backbone.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", help="Where everything goes; what an earlier demo left there is removed.")
    ] = Path("demo-run"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running until Ctrl-C.")] = False,
) -> None:
    """Run a coordinator and agents as real processes on this machine, and compare what the sites gain."""
    console = Console()
    with console.status("starting"):  # torch takes seconds to load
        from lab.demo import run_demo
        from lab.demo_plan import DemoOptions

    run_demo(console, DemoOptions(folder, clients, rounds, dh, method, backbone, data, seed, plan, keep))


@app.command()
def split(
    data: Annotated[str, typer.Argument(help=f"Images to share out: {SOURCES}.")],
    target: Annotated[Path, typer.Argument(help="A new folder; each site gets a folder in it.")],
    clients: Annotated[int, typer.Option(min=1, max=10_000, help="Number of sites.")] = 5,
    dh: Dh = 0.6,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split.")] = 0,
) -> None:
    """Cut a set of images into one folder per site, by the paper's splitter."""
    from lab.splitting import divide

    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DistransError(f"{target} exists and is not an empty folder.", next_step="Name a new folder.")
    division = divide(data, clients, dh, seed)
    table = Table("site", "classes", "training images", title=f"DH {division.dh:.0%}")
    for share in division.sites:
        site = share.write(target)
        table.add_row(str(site.path), " ".join(site.classes[:20]), str(site.images))
    Console().print(table)


@bench_app.command("train")
def bench_train(
    backbones: Annotated[list[str] | None, typer.Argument(help="Networks; all built-in ones if none is named.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Time at least so many steps of each kind.")] = 9,
    seconds: Annotated[float, typer.Option(min=0, help="Go on for at least so long with each backbone.")] = 20,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Speed of local training at 3×64×64, batch 32, against a plain implementation with two passes."""
    from lab.bench_train import run_bench

    run_bench(Console(), backbones, repeats, seconds, device)


@bench_app.command("predict")
def bench_predict(
    backbones: Annotated[
        list[str] | None, typer.Argument(help="Networks; lenet and resnet18 if none is named.")
    ] = None,
    calls: Annotated[int, typer.Option(min=10, help="Number of calls, alone and with eight callers.")] = 400,
) -> None:
    """Latency and throughput of /predict at 64×64, against a bare decode and forward of the same network."""
    from lab.bench_predict import run_bench

    run_bench(Console(), backbones, calls)


def main() -> None:
    """Entry point of the console script."""
    run(app)


if __name__ == "__main__":
    main()
