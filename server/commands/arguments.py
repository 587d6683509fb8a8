"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

DATA = Path("distrans-data")
DataDir = Annotated[
    Path,
    typer.Option("--data-dir", envvar="DISTRANS_DATA_DIR", help="Folder of the embedded database and the admin token."),
]
Db = Annotated[
    str | None,
    typer.Option(
        "--db", envvar="DISTRANS_DB", help="sqlite:///FILE or postgresql://…; unset: a file in the data folder."
    ),
]
Federation = Annotated[str, typer.Argument(help="The federation's name.")]
Client = Annotated[str, typer.Argument(help="The client's name or id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
