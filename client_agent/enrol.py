"""Joining a federation: everything that can be checked here is checked first, enrolling comes last."""

from collections.abc import Callable
from pathlib import Path

import httpx
from pydantic import TypeAdapter, ValidationError

from client_agent import coordinator
from client_agent.data import DataReport, open_data
from client_agent.errors import Refused, StateError
from client_agent.network import open_http
from client_agent.selection import read_class_map
from client_agent.settings import Identity
from client_agent.state import StateFolder
from shared import __version__
from shared.http.connection import Connection
from shared.plan import Name
from shared.problems import DistransError
from shared.runtime import select_device
from shared.schemas import JoinAnswer, JoinRequest

_NAME: TypeAdapter[str] = TypeAdapter(Name)


def join_federation(
    folder: StateFolder,
    connection: Connection,
    invite: str,
    name: str,
    data: str,
    *,
    skip_bad: bool = False,
    class_map: Path | None = None,
    on_report: Callable[[DataReport], None] = lambda _report: None,
    on_file: Callable[[int, int], None] = lambda _done, _total: None,
) -> Identity:
    """Enrol with a one-use invite, which is used up only when everything else has worked.

    A join that was interrupted at any point can be repeated: same folder, same invite.
    """
    if folder.exists:
        raise StateError(f"{folder.path} holds an agent already.", next_step="Use another --state folder.")
    _check_name(name)
    _check_invite(invite)
    here, device = Path(data).expanduser(), select_device()
    spec = str(here.resolve()) if here.exists() else data  # still holds when the agent is started from another folder
    names = {} if class_map is None else read_class_map(class_map)
    with open_http(connection, invite) as http, folder.joining(connection.server, name) as begun:
        try:
            previewed = coordinator.preview(http, begun.attempt if begun.is_repeat else None)
            report = open_data(
                spec,
                previewed.plan,
                skip_bad=skip_bad,
                class_map=names,
                check_files=True,
                cache_bytes=0,
                on_file=on_file,
            ).report
            on_report(report)
        except BaseException:
            folder.forget_join(begun)
            raise
        request = JoinRequest(
            name=name,
            class_counts=report.held_classes,
            held_out_images=report.test_images,
            agent_version=__version__,
            device=device.type,
            attempt=begun.attempt if previewed.takes_attempts else None,
        )
        answer = _enrol(http, request)
        identity = Identity(
            client_id=answer.client_id,
            name=name,
            token=answer.token,
            federation=answer.federation,
            plan=answer.plan,
            connection=connection,
            data=spec,
            skip_bad=skip_bad,
            skipped=report.skipped,
            class_map=names,
        )
        folder.create(identity)
    return identity


def _check_name(name: str) -> None:
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise DistransError(
            f"--name {name!r} is not a valid name.",
            next_step="Use at most 64 letters, digits, dots, dashes and underscores; begin with a letter or a digit.",
        ) from error


def _check_invite(invite: str) -> None:
    if not (invite.isascii() and invite.isprintable() and invite.split() == [invite]):
        raise DistransError(
            "The invite is empty or has characters that no invite has.",
            next_step="Copy the whole token that the operator sent, without spaces or line breaks.",
        )


def _enrol(http: httpx.Client, request: JoinRequest) -> JoinAnswer:
    try:
        return coordinator.join(http, request)
    except DistransError as error:
        if request.attempt is None or (isinstance(error, Refused) and error.status < 500):
            raise
        again = "Then run the same command again: the invite still works for this folder, whether it was used or not."
        raise DistransError(error.message, next_step=f"{error.next_step or ''} {again}".strip()) from error
