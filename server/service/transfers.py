"""What every kind of upload shares: its row and bytes while it is under way, and how it becomes an update, once."""

import uuid
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError
from sqlalchemy import delete
from sqlalchemy.orm import Session

from server.core.errors import Conflict, Gone, InvalidInput, TooLarge
from server.service.context import Context, update_spec, wake
from server.service.enrolment import Identity, refuse_outdated
from server.service.progress import advance
from server.service.tasks import round_of
from server.service.uptime import uptime
from server.store import blobs
from server.store.session import LOCK
from server.store.tables import Client, Federation, Participant, Round, Transfer, Update
from shared.problems import WireError
from shared.schemas import TrainingReport, UpdateReceipt
from shared.wire import Spec

Result = TypeVar("Result")


class UpdateTooLarge(TooLarge):
    """More bytes than an update of the round can have."""

    def __init__(self, spec: Spec) -> None:
        super().__init__("too-large", f"An update of this round has at most {spec.max_total_bytes} bytes.")
        self.max_bytes = spec.max_total_bytes


def lock_part(session: Session, identity: Identity, round_id: int) -> Round:
    """The round, with this client's part in it locked: its requests queue up, and each sees what the last one did."""
    round_ = round_of(session, identity, round_id)
    session.get_one(Participant, (round_id, identity.client_id), with_for_update=LOCK)
    return round_


def lock(session: Session, identity: Identity, round_id: int, transfer_id: str) -> tuple[Participant, Transfer]:
    """The client's part first, as in `lock_part`, then the upload; refused when the upload is over."""
    participant = session.get_one(Participant, (round_id, identity.client_id), with_for_update=LOCK)
    transfer = session.get(Transfer, transfer_id, with_for_update=LOCK)
    if transfer is None:
        raise replaced()
    return participant, transfer


def spec_of(session: Session, round_: Round) -> Spec:
    """What an update of the round must look like."""
    return update_spec(session.get_one(Federation, round_.federation_id).plan, round_.facts)


def refuse_closed(session: Session, round_: Round) -> None:
    """Raise Gone, with the reason, unless the round is open."""
    federation = session.get_one(Federation, round_.federation_id)
    if round_.state == "open":
        return
    fate = {
        "aggregating": "it closed and is being aggregated",
        "done": "it is done",
        "failed": f"it failed: {round_.reason}",
    }[round_.state]
    raise Gone(
        "round-closed",
        f"Round {round_.number} takes no more updates: {fate}. The federation is {federation.state}.",
        next_step="GET /v1/task tells what is next.",
    )


def replaced() -> Conflict:
    """The error of a request whose upload is over."""
    return Conflict("upload-replaced", "A newer upload of this client, or the end of the round, ended this one.")


def find(session: Session, round_id: int, identity: Identity) -> Transfer | None:
    """The client's upload under way, if there is one."""
    return session.query(Transfer).filter_by(round_id=round_id, client_id=identity.client_id).one_or_none()


def start(
    session: Session, ctx: Context, identity: Identity, round_id: int, *, resumable: bool, length: int, digest: str = ""
) -> Transfer:
    """Begin an upload, which takes the place of the client's earlier one."""
    old = find(session, round_id, identity)
    if old is not None:
        drop(session, old)
    transfer = Transfer(
        id=uuid.uuid4().hex,
        round_id=round_id,
        client_id=identity.client_id,
        blob_id=blobs.begin_blob(session),
        resumable=resumable,
        length_bytes=length,
        digest=digest,
        started_at=ctx.clock(),
        touched_uptime=uptime(session),
    )
    session.add(transfer)
    session.flush()
    return transfer


def append(session: Session, participant: Participant, transfer: Transfer, pieces: list[blobs.Piece]) -> int:
    """Store bytes; the new size.

    An upload counts as arriving only while it brings bytes that were never there before: whoever begins again and again
    could otherwise hold the round open past its deadline with next to nothing.
    """
    size_bytes = blobs.append(session, transfer.blob_id, pieces)
    if pieces:
        transfer.touched_uptime = uptime(session)
    if size_bytes > participant.most_bytes:
        participant.most_bytes, transfer.grown_uptime = size_bytes, transfer.touched_uptime
    return size_bytes


def drop(session: Session, transfer: Transfer) -> None:
    """Forget an upload that did not become an update, unless it just became one, or another process was first."""
    dropped = session.execute(delete(Transfer).where(Transfer.id == transfer.id))
    if dropped.rowcount:  # type: ignore[attr-defined]  # a DELETE's result has it
        blobs.drop(session, transfer.blob_id)


def discard(ctx: Context, transfer_id: str) -> None:
    """Drop an upload by its id, if it is still there."""
    with ctx.db.write() as session:
        transfer = session.get(Transfer, transfer_id)
        if transfer is not None:
            drop(session, transfer)


def checked(step: Callable[[], Result]) -> Result:
    """Run a step of a Checker; what it finds wrong is the client's input."""
    try:
        return step()
    except WireError as error:
        raise InvalidInput(error.code, error.message, next_step=error.next_step) from error


def accept(
    ctx: Context, identity: Identity, round_id: int, transfer_id: str, digest: str, metadata: dict[str, str]
) -> UpdateReceipt:
    """Turn a whole and valid upload into the client's update, and advance the round. A repeat gets the same receipt."""
    try:
        report = TrainingReport.model_validate_json(metadata.get("report", ""))
    except ValidationError as error:
        raise InvalidInput(
            "invalid-report",
            "The metadata has no valid training report.",
            next_step="Put the report as JSON under 'report' into the safetensors metadata.",
        ) from error
    with ctx.db.write() as session:
        # The federation's lock makes two last uploads queue up: the second one sees the first.
        federation = session.get_one(Federation, identity.federation_id, with_for_update=LOCK)
        round_ = lock_part(session, identity, round_id)
        if session.get(Update, (round_id, identity.client_id)) is None:
            refuse_outdated(session, identity)  # its token was checked when the request began
            refuse_closed(session, round_)
            transfer = session.get(Transfer, transfer_id, with_for_update=LOCK)
            if transfer is None:
                raise replaced()
            blob = blobs.seal(session, transfer.blob_id, digest)
            update = Update(
                round_id=round_id,
                client_id=identity.client_id,
                blob_id=blob.id,
                digest=digest,
                size_bytes=blob.size_bytes,
                report=report.model_dump_json(),
                received_at=ctx.clock(),
            )
            session.add(update)
            session.delete(transfer)
            session.get_one(Client, identity.client_id).heard_uptime = uptime(session)  # the next round may open now
            session.flush()
            wake(federation)
            advance(session, ctx, federation)
            return _receipt(session, update)
    return repeated_receipt(ctx, identity, round_id, digest)  # the same client's other request was first


def repeated_receipt(ctx: Context, identity: Identity, round_id: int, digest: str | None) -> UpdateReceipt:
    """The receipt of the update that was accepted, for another upload of the same bytes; Conflict for other bytes."""
    with ctx.db.read() as session:
        update = session.get_one(Update, (round_id, identity.client_id))
        if update.digest != digest:
            which = "Another" if digest else "An"
            raise Conflict(
                "already-uploaded",
                f"{which} update of this client was accepted for this round.",
                next_step="It cannot be replaced; continue with the next task.",
            )
        return _receipt(session, update)


def _receipt(session: Session, update: Update) -> UpdateReceipt:
    return UpdateReceipt(
        round=session.get_one(Round, update.round_id).number,
        digest=update.digest,
        size_bytes=update.size_bytes,
        received_at=update.received_at,
    )
