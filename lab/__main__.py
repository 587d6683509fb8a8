"""`distrans-lab`. Heavy imports stand inside the commands, so that `--help` answers at once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from shared.command_line import VersionOption, run
from shared.method_options import MethodOptions
from shared.problems import DistransError


class Scale(StrEnum):
    """How large an experiment is run."""

    full = "full"
    small = "small"


class Engine(StrEnum):
    """Where an experiment is run."""

    sequential = "sequential"
    processes = "processes"
    ray = "ray"


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


@app.command(name="run")
def run_command(
    file: Annotated[Path, typer.Argument(help="An experiment: a TOML file, or the name of one of the paper's.")],
    scale: Annotated[Scale, typer.Option(help="full, or the file's small form.")] = Scale.full,
    engine: Annotated[Engine, typer.Option(help="Where federations run.")] = Engine.sequential,
    workers: Annotated[int, typer.Option(min=0, help="Federations at a time; 0: one a core.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Results; default: lab-results/NAME-SCALE.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Data sets; default: $DISTRANS_DATA, else ./data.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    only: Annotated[
        list[str] | None, typer.Option(help="data=…, shift=…, method=…, dh=…, seed=…, clients=… or vary=…; repeatable.")
    ] = None,
) -> None:
    """Run an experiment's federations that are not done yet; Ctrl-C and a second run go on where it stopped."""
    from lab.datasets import data_root as find_root
    from lab.experiment import load_experiment
    from lab.paper import find_experiment
    from lab.report import write_report
    from lab.results import Results
    from lab.runs import RunOptions, results_folder, run_experiment

    path, console = find_experiment(file), Console()
    experiment = load_experiment(path)
    options = RunOptions(scale.value, engine.value, workers, out, find_root(data_root), device, tuple(only or ()))
    failed = run_experiment(console, path, experiment, options)
    folder = results_folder(experiment, scale.value, out)
    if experiment.kind != "federations" or Results(folder).of(experiment.cells(scale.value)):
        report_file = write_report(folder, find_root(data_root), scale.value)
        console.print(f"Report: {report_file}", soft_wrap=True, highlight=False)
    if failed:
        raise typer.Exit(1)


@app.command()
def report(
    source: Annotated[Path, typer.Argument(help="A folder of results, or the experiment's file or name.")],
    scale: Annotated[
        Scale | None, typer.Option(help="Which results; default: those that are there, and full where both are.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(help="Data sets, for figures that look at images.")] = None,
) -> None:
    """Write report.md with its figures into the folder: measured numbers beside the paper's."""
    from lab.datasets import data_root as find_root
    from lab.experiment import load_experiment
    from lab.paper import find_experiment
    from lab.report import write_report
    from lab.runs import results_folder

    folder = source
    if not source.is_dir():
        experiment = load_experiment(find_experiment(source))
        folders = [results_folder(experiment, one.value) for one in ([scale] if scale else Scale)]
        folder = next((found for found in folders if found.is_dir()), folders[0])
    written = write_report(folder, find_root(data_root), scale.value if scale else None)
    typer.echo(written.read_text(encoding="utf-8"))


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
