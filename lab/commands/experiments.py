"""`distrans-lab run` and `report`."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from lab.commands.options import DataRoot, Device
from lab.experiments import EngineName, Scale


def run(
    file: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT", help="TOML file, or the name of a built-in experiment: table1, …")
    ],
    scale: Annotated[
        Scale, typer.Option(metavar="SCALE", help="full, or small for the small form of the experiment.")
    ] = "full",
    engine: Annotated[
        EngineName,
        typer.Option(
            metavar="ENGINE",
            help="Where federations run: sequential (one at a time), processes, or ray (the cluster at $RAY_ADDRESS, "
            "else a local one).",
        ),
    ] = "sequential",
    workers: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Federations to run in parallel (0 = one per core); not for sequential."),
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Results folder (default: lab-results/NAME-SCALE).")
    ] = None,
    data_root: DataRoot = None,
    device: Device = "auto",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Run only some federations: data, shift, method, dh, seed, clients or vary. Repeatable.",
        ),
    ] = None,
) -> None:
    """Run an experiment and write its report.

    Skips finished federations; run it again to resume after Ctrl-C.
    """
    from lab.datasets.registry import data_root as find_root
    from lab.experiments.experiment import find_experiment, load_experiment
    from lab.experiments.report import write_report
    from lab.experiments.results import Results
    from lab.experiments.runs import ExperimentOptions, results_folder, run_experiment

    path, console = find_experiment(file), Console()
    experiment = load_experiment(path)
    options = ExperimentOptions(scale, engine, workers, out, find_root(data_root), device, tuple(only or ()))
    failed = run_experiment(console, path, experiment, options)
    folder = results_folder(experiment, scale, out)
    if experiment.kind != "federations" or Results(folder).of(experiment.cells(scale)):
        report_file = write_report(folder, find_root(data_root), scale)
        console.print(f"Report: {report_file}", soft_wrap=True, highlight=False)
    if failed:
        raise typer.Exit(1)


def report(
    source: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="Results folder, or the experiment's file or name.")
    ],
    scale: Annotated[
        Scale | None, typer.Option(metavar="SCALE", help="full or small (default: whichever exists, full if both do).")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Write and print the report of an experiment.

    Writes report.md and its figures into the results folder, with the paper's numbers next to the measured ones.
    """
    from lab.datasets.registry import data_root as find_root
    from lab.experiments.experiment import find_experiment, load_experiment
    from lab.experiments.report import write_report
    from lab.experiments.runs import results_folder

    folder = source
    if not source.is_dir():
        experiment = load_experiment(find_experiment(source))
        folders = [results_folder(experiment, one) for one in ([scale] if scale else get_args(Scale))]
        folder = next((found for found in folders if found.is_dir()), folders[0])
    written = write_report(folder, find_root(data_root), scale)
    typer.echo(written.read_text(encoding="utf-8"))
