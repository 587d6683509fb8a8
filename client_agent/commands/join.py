"""`distrans-agent join`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from client_agent.commands.arguments import STATE, State, run_command
from client_agent.commands.output import out
from shared.environment import ask_secret, read_secret, secret
from shared.problems import DistransError

if TYPE_CHECKING:
    from client_agent.data import DataReport


def join(
    server: Annotated[str, typer.Option(help="The coordinator, https://host[:port].")],
    name: Annotated[str, typer.Option(help="This site's name in the federation.")],
    data: Annotated[
        str,
        typer.Option(
            help="A folder (train/CLASS/…, test/CLASS/… or CLASS/…), .csv, .npz, sklearn:digits, "
            "torchvision:NAME:ROOT or package.module:function."
        ),
    ],
    invite: Annotated[
        str | None,
        typer.Option(
            help="The invite token from the operator. Other users of the machine can see it here: "
            "prefer --invite-file, DISTRANS_INVITE, DISTRANS_INVITE_FILE, or the prompt."
        ),
    ] = None,
    invite_file: Annotated[
        Path | None, typer.Option(help="File that holds the invite token; - reads the standard input.")
    ] = None,
    state: State = STATE,
    class_map: Annotated[
        Path | None,
        typer.Option(help='TOML file that names the plan\'s class for each of yours: "Tumors" = "tumor".'),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out unreadable files and unknown classes, now and in every run."),
    ] = False,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of the authority to trust.")] = None,
    client_cert: Annotated[Path | None, typer.Option(help="PEM file of this site's certificate.")] = None,
    client_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    allow_insecure_http: Annotated[
        bool, typer.Option("--allow-insecure-http", help="Allow http:// to another machine.")
    ] = False,
) -> None:
    """Check this site's data against the plan, and enrol. An interrupted join can be repeated with the same invite."""
    token = _find_invite(invite, invite_file)
    from rich.progress import Progress

    from client_agent.enrol import join_federation
    from client_agent.settings import Connection, expand
    from client_agent.state import StateFolder

    connection = Connection(
        server=server.rstrip("/"),
        ca_file=expand(ca_file),
        client_cert=expand(client_cert),
        client_key=expand(client_key),
        allow_insecure_http=allow_insecure_http,
    )
    with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("checking the images", total=None)
        identity = join_federation(
            StateFolder(state),
            connection,
            token,
            name,
            data,
            skip_bad=skip_bad,
            class_map=class_map,
            on_report=_print_counts,
            on_file=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    out.print(
        f"Joined {identity.federation} as {name}. Credentials are in {state}, readable by you alone. "
        f"Next: {run_command(state)}",
        highlight=False,
    )


def _find_invite(invite: str | None, file: Path | None) -> str:
    if invite is not None and file is not None:
        raise DistransError("--invite and --invite-file are two ways to give the same token.", next_step="Use one.")
    if invite is None:
        invite = secret("DISTRANS_INVITE") if file is None else read_secret(file)
    if invite is None:
        invite = ask_secret("Invite token")
    if invite is None:
        raise DistransError(
            "There is no invite token.",
            next_step="Pass --invite-file FILE (- for the standard input), or set DISTRANS_INVITE "
            "or DISTRANS_INVITE_FILE.",
        )
    return invite.strip()


def _print_counts(report: "DataReport") -> None:
    table = Table("class", "training images", "held-out images")
    for label, count in report.class_counts.items():
        if count or report.test_counts[label]:
            table.add_row(label, str(count), str(report.test_counts[label]))
    out.print(table)
    if report.bad:
        files, classes = len(report.skipped.files), len(report.skipped.classes)
        out.print(f"Leaving out {files} files and {classes} classes, also in every run:", style="yellow")
        for line in report.bad[:10]:
            out.print(f"  {line}", markup=False, highlight=False)
