"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

_SHIFTS = ("none", "rotated", "inverted")


def _check_shift(value: str) -> str:
    if value not in _SHIFTS:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(_SHIFTS)}.")
    return value


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
Shift = Annotated[
    str,
    typer.Option(
        metavar="SHIFT",
        callback=_check_shift,
        help="How images differ between sites: none, rotated (by 0, 90, 180 or 270 degrees in turn), or inverted (at "
        "every other site).",
    ),
]
Images = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Training images per site (0 = all); a site's other images test its models."),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="Device to compute on: auto, cpu, cuda, cuda:1, …")]
DataRoot = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the data sets (default: $DISTRANS_DATA, else ./data)."),
]
