"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

SOURCES = "a folder with one folder per class, a .csv or .npz file, sklearn:digits, or torchvision:NAME:ROOT"
Dh = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        min=0,
        max=1,
        help="Distributional heterogeneity, from 0 (every site has all classes) to 1 (no class in common).",
    ),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="Device to compute on: auto, cpu, cuda, cuda:1, …")]
DataRoot = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the data sets (default: $DISTRANS_DATA, else ./data)."),
]
