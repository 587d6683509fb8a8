"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from shared.problems import DistransError

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
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="DISTRANS_SERVER",
        help="URL of a running coordinator to work on, instead of a database; needs its admin token "
        "(DISTRANS_ADMIN_TOKEN or DISTRANS_ADMIN_TOKEN_FILE).",
    ),
]
AdminTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-token-file", help="With --server: a file that holds the admin token; - reads the standard input."
    ),
]
CaFile = Annotated[
    Path | None, typer.Option("--ca-file", help="With --server: PEM file of the authority to trust, if it is your own.")
]
ClientCert = Annotated[
    Path | None, typer.Option("--client-cert", help="With --server: PEM file of a certificate that it asks for.")
]
ClientKey = Annotated[Path | None, typer.Option("--client-key", help="With --server: PEM file of its key.")]
AllowInsecureHttp = Annotated[
    bool, typer.Option("--allow-insecure-http", help="With --server: send the admin token unencrypted over a network.")
]


def _refuse_server(value: str | None) -> None:
    if value is not None:
        raise DistransError(
            "This command needs the coordinator's database and cannot work with --server.",
            next_step="Run it on the coordinator's machine, with --db or --data-dir.",
        )


NoServer = Annotated[str | None, typer.Option("--server", hidden=True, callback=_refuse_server)]
Federation = Annotated[str, typer.Argument(help="The federation's name.")]
Client = Annotated[str, typer.Argument(help="The client's name or id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
