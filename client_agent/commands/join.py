"""`distrans-agent join`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from client_agent.commands.arguments import STATE, State
from client_agent.commands.output import out
from shared.problems import DistransError

if TYPE_CHECKING:
    from client_agent.data import DataReport


def join(
    server: Annotated[str, typer.Option(help="The coordinator, https://host[:port].")],
    invite: Annotated[str, typer.Option(envvar="DISTRANS_INVITE", help="The invite token from the operator.")],
    name: Annotated[str, typer.Option(help="This site's name in the federation.")],
    data: Annotated[
        str,
        typer.Option(
            help="A folder (train/CLASS/…, test/CLASS/… or CLASS/…), .csv, .npz, sklearn:digits, "
            "torchvision:NAME:ROOT or package.module:function."
        ),
    ] = "sklearn:digits",
    state: State = STATE,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on without unreadable files and unknown classes.")
    ] = False,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of the authority to trust.")] = None,
    client_cert: Annotated[Path | None, typer.Option(help="PEM file of this site's certificate.")] = None,
    client_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    allow_insecure_http: Annotated[
        bool, typer.Option("--allow-insecure-http", help="Allow http:// to another machine.")
    ] = False,
) -> None:
    """Check this site's data against the plan, and enrol."""
    from pydantic import ValidationError
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
        try:
            identity = join_federation(
                StateFolder(state),
                connection,
                invite,
                name,
                data,
                skip_bad=skip_bad,
                on_report=_print_counts,
                on_file=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        except ValidationError as error:
            faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
            raise DistransError(f"The site cannot join like this: {faults}.") from error
    out.print(
        f"Joined {identity.federation} as {name}. Credentials are in {state}, readable by you alone. "
        f"Next: distrans-agent run{'' if state == STATE else f' --state {shlex.quote(str(state))}'}",
        highlight=False,
    )


def _print_counts(report: "DataReport") -> None:
    table = Table("class", "training images", "held-out images")
    for label, count in report.class_counts.items():
        if count or report.test_counts[label]:
            table.add_row(label, str(count), str(report.test_counts[label]))
    out.print(table)
    if report.bad:
        out.print(f"Went on without {len(report.bad)} faulty files or classes:", style="yellow")
        for line in report.bad[:10]:
            out.print(f"  {line}", markup=False, highlight=False)
