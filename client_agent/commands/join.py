"""`distrans-agent join`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from client_agent.commands.options import STATE, State, find_secret, state_option
from client_agent.commands.output import out
from shared.contract.errors import DistransError
from shared.system.secrets import ask_secret

if TYPE_CHECKING:
    from client_agent.data.dataset import DataReport


def join(
    server: Annotated[str, typer.Option(metavar="URL", help="URL of the coordinator: https://host[:port].")],
    name: Annotated[str, typer.Option(metavar="NAME", help="This site's name in the federation.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="This site's images: a folder (train/CLASS/… with test/CLASS/…, or CLASS/…), a .csv, an .npz, "
            "sklearn:digits, torchvision:NAME:ROOT or package.module:function.",
        ),
    ],
    invite: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="The operator's invite. Visible to other users of the machine: prefer --invite-file, "
            "DISTRANS_INVITE, DISTRANS_INVITE_FILE or the prompt.",
        ),
    ] = None,
    invite_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the invite; - reads standard input.")
    ] = None,
    state: State = STATE,
    class_map: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='TOML file that maps class names to the plan\'s: "Tumors" = "tumor".'),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Skip unreadable files and unknown classes, now and in every run."),
    ] = False,
    withhold_class_counts: Annotated[
        bool,
        typer.Option(
            "--withhold-class-counts",
            help="Do not tell the coordinator how many images of each class this site has, now and in every run.",
        ),
    ] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM file of the certificate authority to trust (default: the system's)."),
    ] = None,
    client_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of this site's client certificate.")
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of the client certificate's key.")
    ] = None,
    allow_insecure_http: Annotated[
        bool, typer.Option("--allow-insecure-http", help="Allow unencrypted http:// to another machine.")
    ] = False,
) -> None:
    """Check this site's images against the plan, then enroll. An interrupted join can be repeated."""
    token = _find_invite(invite, invite_file)
    from rich.progress import Progress

    from client_agent.coordinator.enrollment import join_federation
    from client_agent.state.folder import StateFolder
    from shared.http.client_connection import Connection

    connection = Connection(
        server=server.rstrip("/"),
        ca_file=_absolute(ca_file),
        client_cert=_absolute(client_cert),
        client_key=_absolute(client_key),
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
            withhold_class_counts=withhold_class_counts,
            on_report=_print_counts,
            on_file=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if withhold_class_counts:
        out.print("These counts stay here; the coordinator was told only how many held-out images there are.")
    out.print(
        f"Joined {identity.federation} as {name}. Credentials are in {state}, readable only by you. "
        f"Next: distrans-agent run{state_option(state)}",
        highlight=False,
    )


def _find_invite(invite: str | None, file: Path | None) -> str:
    found = find_secret("--invite", invite, file, "DISTRANS_INVITE")
    if found is None:
        found = ask_secret("Invite token")
    if found is None:
        raise DistransError(
            "There is no invite.",
            next_step="Pass --invite-file FILE (- for standard input), or set DISTRANS_INVITE or DISTRANS_INVITE_FILE.",
        )
    return found.strip()


def _absolute(path: Path | None) -> str | None:
    """Return a path that stays valid when the agent is started from another folder."""
    return None if path is None else str(path.expanduser().resolve())


def _print_counts(report: "DataReport") -> None:
    table = Table("class", "training images", "held-out images")
    for label, count in report.class_counts.items():
        if count or report.test_counts[label]:
            table.add_row(label, str(count), str(report.test_counts[label]))
    out.print(table)
    out.print(f"Held-out images: {report.holdout}.", highlight=False)
    if report.problems:
        counts = {"files": len(report.skipped.files), "classes": len(report.skipped.classes)}
        skipped = ", ".join(f"{what}: {count}" for what, count in counts.items())
        out.print(f"Skipped, now and in every run ({skipped}):", style="yellow")
        for line in report.first_problems:
            out.print(f"  {line}", markup=False, highlight=False)
