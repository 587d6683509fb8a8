"""`distrans-lab demo` and `split`: federations of real processes, and data for sites."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lab.commands.options import SOURCES, Dh, Images, Shift
from shared.contract.errors import DistransError
from shared.contract.method_options import METHOD_NAMES
from shared.contract.plan import BUILT_IN_BACKBONES


def demo(
    clients: Annotated[int, typer.Option(metavar="N", min=1, max=50, help="Number of sites.")] = 10,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Number of rounds.")] = 35,
    dh: Dh = 0.2,
    shift: Shift = "inverted",
    images: Images = 40,
    method: Annotated[
        str, typer.Option(metavar="NAME", help=f"Federated method: {', '.join(METHOD_NAMES)}.")
    ] = "distrans",
    backbone: Annotated[str, typer.Option(metavar="NAME", help=f"Network: {', '.join(BUILT_IN_BACKBONES)}.")] = "lenet",
    data: Annotated[str, typer.Option(metavar="SOURCE", help=f"Images to split: {SOURCES}.")] = "sklearn:digits",
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan to run; replaces --rounds, --method and --backbone."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder for all files; an earlier demo in it is deleted.")
    ] = Path("demo-run"),
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")] = False,
) -> None:
    """Run a whole federation on this machine.

    Starts a coordinator and agents as real processes, and shows whether joining pays off at each site.
    """
    console = Console()
    with console.status("starting"):  # importing torch takes seconds
        from lab.demo.plan import DemoOptions
        from lab.demo.run import run_demo

    options = DemoOptions(
        folder=folder,
        clients=clients,
        rounds=rounds,
        dh=dh,
        shift=shift,  # type: ignore[arg-type]  # checked when it was parsed
        images=images,
        method=method,
        backbone=backbone,
        data=data,
        seed=seed,
        plan=plan,
        keep=keep,
    )
    run_demo(console, options)


def split(
    data: Annotated[str, typer.Argument(metavar="SOURCE", help=f"Images to split: {SOURCES}.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the sites' folders.")],
    clients: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Number of sites.")] = 5,
    dh: Dh = 0.6,
    shift: Shift = "none",
    images: Images = 0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the split.")] = 0,
) -> None:
    """Split images into one folder per site, as in the paper."""
    from lab.datasets.site_folders import plan_split

    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DistransError(f"{target} exists and is not an empty folder.", next_step="Use a new folder.")
    division = plan_split(data, clients, dh, seed, images=images, shift=shift)  # type: ignore[arg-type]  # checked
    table = Table("site", "classes", "training images", title=f"DH {division.dh:.0%}")
    if shift != "none":
        table.add_column("scanner")
    for share in division.sites:
        site = share.write(target)
        cells = (str(site.path), " ".join(site.classes[:20]), str(site.images), site.scanner)
        table.add_row(*cells[: len(table.columns)])
    Console().print(table)
