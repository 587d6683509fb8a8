"""Joining a federation: check everything that can be checked locally, then enroll."""

from collections.abc import Callable
from pathlib import Path

import httpx
from pydantic import TypeAdapter, ValidationError

from client_agent.coordinator import calls
from client_agent.coordinator.connection import open_http
from client_agent.coordinator.tokens import looks_like_token
from client_agent.data.class_map import read_class_map
from client_agent.data.dataset import DataReport, open_data
from client_agent.errors import RequestRefused
from client_agent.settings import Identity
from client_agent.state.folder import StateFolder
from client_agent.state.pending_join import joining
from shared import __version__
from shared.contract.errors import DistransError
from shared.contract.messages import JoinAnswer, JoinRequest
from shared.contract.plan import FederationPlan, Name
from shared.http.client_connection import Connection
from shared.learning.runtime import select_device

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
    withhold_class_counts: bool = False,
    on_report: Callable[[DataReport], None] = lambda _report: None,
    on_file: Callable[[int, int], None] = lambda _done, _total: None,
) -> Identity:
    """Enroll with a one-use invite, which is used up only after everything else has worked.

    An interrupted join can be repeated with the same folder and the same invite.
    """
    _check_name(name)
    _check_invite(invite)
    here, device = Path(data).expanduser(), select_device()
    spec = str(here.resolve()) if here.exists() else data  # absolute, as the agent may be started from another folder
    names = {} if class_map is None else read_class_map(class_map)
    with open_http(connection, invite) as http, joining(folder.path, connection.server, name) as begun:
        try:
            previewed = calls.preview_invite(http, begun.attempt if begun.is_repeat else None)
            if withhold_class_counts:
                _check_optional_counts(previewed.plan)
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
            begun.forget()
            raise
        request = JoinRequest(
            name=name,
            class_counts={} if withhold_class_counts else report.nonzero_class_counts,
            held_out_images=report.test_images,
            agent_version=__version__,
            device=device.type,
            attempt=begun.attempt if previewed.takes_attempts else None,
        )
        answer = _enroll(http, request)
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
            withhold_class_counts=withhold_class_counts,
        )
        folder.create(identity)
    return identity


def _check_name(name: str) -> None:
    try:
        _NAME.validate_python(name)
    except ValidationError as error:
        raise DistransError(
            f"--name {name!r} is not a valid name.",
            next_step="Use at most 64 letters, digits, dots, dashes and underscores; start with a letter or a digit.",
        ) from error


def _check_invite(invite: str) -> None:
    if not looks_like_token(invite):
        raise DistransError(
            "The invite is empty, too long, or contains characters that invites do not have.",
            next_step="Copy the whole token that the operator sent, without spaces or line breaks.",
        )


def _check_optional_counts(plan: FederationPlan) -> None:
    if plan.counts_needed_by:
        raise DistransError(
            f"This federation needs every site's class counts, because of {plan.counts_needed_by}.",
            next_step="Join without --withhold-class-counts, or ask the operator for another plan.",
        )


def _enroll(http: httpx.Client, request: JoinRequest) -> JoinAnswer:
    try:
        return calls.join(http, request)
    except DistransError as error:
        if request.attempt is None or (isinstance(error, RequestRefused) and error.status < 500):
            raise
        again = "Then run the same command again: the invite still works for this folder, even if it was used."
        raise DistransError(error.message, next_step=f"{error.next_step or ''} {again}".strip()) from error
