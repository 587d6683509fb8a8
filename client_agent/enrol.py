"""Joining a federation: the data are checked first, then the site enrols, then its folder is made."""

from collections.abc import Callable
from pathlib import Path

from client_agent import coordinator
from client_agent.data import DataReport, open_data
from client_agent.network import open_http
from client_agent.settings import Connection, Identity
from client_agent.state import StateFolder
from shared import __version__
from shared.problems import DistransError
from shared.runtime import select_device
from shared.schemas import JoinRequest


def join_federation(
    folder: StateFolder,
    connection: Connection,
    invite: str,
    name: str,
    data: str,
    *,
    skip_bad: bool = False,
    on_report: Callable[[DataReport], None] = lambda _report: None,
    on_file: Callable[[int, int], None] = lambda _done, _total: None,
) -> Identity:
    """Enrol with a one-use invite; nothing is used up when the data do not fit the plan."""
    if folder.exists:
        raise DistransError(f"{folder.path} holds an agent already.", next_step="Use another --state folder.")
    here = Path(data).expanduser()
    spec = str(here.resolve()) if here.exists() else data
    with open_http(connection, invite) as http:
        plan = coordinator.preview(http).plan
        report = open_data(spec, plan, skip_bad=skip_bad, check_files=True, cache_bytes=0, on_file=on_file).report
        on_report(report)
        request = JoinRequest(
            name=name,
            class_counts=report.held_classes,
            held_out_images=report.test_images,
            agent_version=__version__,
            device=select_device().type,
        )
        answer = coordinator.join(http, request)
    identity = Identity(
        client_id=answer.client_id,
        name=name,
        token=answer.token,
        federation=answer.federation,
        plan=answer.plan,
        connection=connection,
        data=spec,
        skip_bad=skip_bad,
    )
    folder.create(identity)
    return identity
