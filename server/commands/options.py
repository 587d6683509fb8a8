"""Arguments and options that several commands share."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.contract.errors import DistransError

DATA = Path("distrans-data")
DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        envvar="DISTRANS_DATA_DIR",
        metavar="DIR",
        help="Folder for the embedded database and the admin token.",
    ),
]
Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="DISTRANS_DB",
        metavar="URL",
        help="Database: sqlite:///FILE or postgresql://…",
        show_default="distrans.db in the data folder",
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="DISTRANS_SERVER",
        metavar="URL",
        help="Work on the running coordinator at this URL instead of a database. Needs its admin token: set "
        "DISTRANS_ADMIN_TOKEN or DISTRANS_ADMIN_TOKEN_FILE, or enter it at the prompt.",
    ),
]
AdminTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-token-file",
        metavar="FILE",
        help="With --server: file that contains the admin token (- = standard input).",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        help="With --server: PEM file of the certificate authority to trust.",
        show_default="the system's authorities",
    ),
]
ClientCert = Annotated[
    Path | None,
    typer.Option("--client-cert", metavar="FILE", help="With --server: PEM file of the client certificate to present."),
]
ClientKey = Annotated[
    Path | None,
    typer.Option("--client-key", metavar="FILE", help="With --server: PEM file of the client certificate's key."),
]
AllowInsecureHttp = Annotated[
    bool,
    typer.Option(
        "--allow-insecure-http", help="With --server: allow http:// over a network, which exposes the admin token."
    ),
]
Federation = Annotated[str, typer.Argument(metavar="FEDERATION", help="Name of the federation.", show_default=False)]
Client = Annotated[str, typer.Argument(metavar="CLIENT", help="Name or id of the client.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_REMOTE_OPTIONS = ("--server", "--admin-token-file", "--ca-file", "--client-cert", "--client-key")


def without_server(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command reject --server and the options that belong to it, with an explanation."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        command(*arguments, **{name: value for name, value in options.items() if name not in hidden})

    hidden = {
        option.strip("-").replace("-", "_"): Annotated[
            str | None, typer.Option(option, hidden=True, callback=_refuse_server)
        ]
        for option in _REMOTE_OPTIONS
    }
    hidden["allow_insecure_http"] = Annotated[
        bool | None, typer.Option("--allow-insecure-http", hidden=True, callback=_refuse_server)
    ]
    extra = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in hidden.items()]
    return show_to_typer(run, [*signature(command).parameters.values(), *extra])


def show_to_typer(run: Callable[..., None], parameters: list[Parameter]) -> Callable[..., None]:
    """Let typer see these parameters instead of those of the wrapped function."""
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps; typer would look there
    return run


def _refuse_server(value: str | bool | None) -> None:
    if value:
        raise DistransError(
            "This command needs the coordinator's database and does not work with --server.",
            next_step="Run it on the coordinator's machine, with --db or --data-dir.",
        )
