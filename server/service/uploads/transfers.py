"""What both kinds of upload share: the row and bytes of one in progress, and its acceptance as an update."""

import uuid
from dataclasses import dataclass
from typing import cast

from pydantic import ValidationError
from sqlalchemy import Table, and_, bindparam, delete, select, true, update
from sqlalchemy.orm import Session

from server.core.errors import Conflict, Gone, InvalidInput, TooLarge
from server.service.client_tokens import require_current_client
from server.service.context import Context, Identity, wake_aggregator
from server.service.method_calls import update_spec
from server.service.queries import round_of
from server.service.transitions import advance
from server.service.uploads.validation import ValidBody
from server.service.uptime import uptime
from server.store import blobs
from server.store.database import LOCK
from server.store.objects.store import Piece
from server.store.tables import Blob, Client, CoordinatorClock, Federation, Participant, Round, Transfer, Update
from shared.contract.measurements import TrainingReport
from shared.contract.messages import UpdateReceipt
from shared.tensors.spec import Spec

# Built once: they run for every piece of an upload, and building them takes longer than running them.
_PROGRESS = (
    select(
        Transfer.id,
        Transfer.round_id,
        Transfer.client_id,
        Transfer.blob_id,
        Blob.size_bytes,
        Participant.most_bytes,
        CoordinatorClock.uptime,
    )
    .select_from(Transfer)
    .join(Blob, Blob.id == Transfer.blob_id)
    .join(Participant, and_(Participant.round_id == Transfer.round_id, Participant.client_id == Transfer.client_id))
    .join(CoordinatorClock, true())
    .where(Transfer.id == bindparam("given_id"))
    .with_for_update(key_share=True, of=[Participant, Transfer, Blob])  # locked in this order
)
_PARTS, _TRANSFERS = (cast(Table, table.__table__) for table in (Participant, Transfer))
_RAISE_MOST = (
    update(_PARTS)
    .where(_PARTS.c.round_id == bindparam("given_round_id"), _PARTS.c.client_id == bindparam("given_client_id"))
    .values(most_bytes=bindparam("most_bytes"))
)
_TOUCH = (
    update(_TRANSFERS)
    .where(_TRANSFERS.c.id == bindparam("given_id"))
    .values(touched_uptime=bindparam("touched_uptime"))
)
_GREW = _TOUCH.values(grown_uptime=bindparam("grown_uptime"))


class UpdateTooLarge(TooLarge):
    """More bytes than an update of the round may have."""

    def __init__(self, spec: Spec) -> None:
        super().__init__("too-large", f"An update of this round may have at most {spec.max_total_bytes} bytes.")
        self.max_bytes = spec.max_total_bytes


def check_opening(session: Session, identity: Identity, round_id: int, length: int | None) -> tuple[Spec, bool]:
    """Lock the client's part in the round; return the update's spec and whether an update was accepted before.

    Raise if the length is over the limit, or if the round is closed without an update of this client.
    """
    round_ = lock_participant(session, identity, round_id)
    spec = spec_of(session, round_)
    if length is not None and length > spec.max_total_bytes:
        raise UpdateTooLarge(spec)
    is_accepted = session.get(Update, (round_id, identity.client_id)) is not None
    if not is_accepted:
        require_open_round(session, round_)
    return spec, is_accepted


def lock_participant(session: Session, identity: Identity, round_id: int) -> Round:
    """Return the round, with this client's part locked so that its requests run one after another."""
    round_ = round_of(session, identity, round_id)
    session.get_one(Participant, (round_id, identity.client_id), with_for_update=LOCK)
    return round_


@dataclass(frozen=True)
class Progress:
    """How far an upload has come, locked until the end of the transaction."""

    transfer_id: str
    round_id: int
    client_id: str
    blob_id: str
    size_bytes: int
    most_bytes: int  # as in Participant
    uptime: float


def lock(session: Session, transfer_id: str) -> Progress:
    """Lock the client's part, as in `lock_participant`, then the upload and its bytes; raise if the upload has ended.

    A single statement: it is repeated for every piece of an upload.
    """
    row = session.execute(_PROGRESS, {"given_id": transfer_id}).one_or_none()
    if row is None:
        raise upload_ended()
    return Progress(*row)


def spec_of(session: Session, round_: Round) -> Spec:
    """Return the spec of an update of the round."""
    return update_spec(session, session.get_one(Federation, round_.federation_id), round_)


def require_open_round(session: Session, round_: Round) -> None:
    """Raise Gone, with the reason, unless the round is open."""
    federation = session.get_one(Federation, round_.federation_id)
    if round_.state == "open":
        return
    fate = {
        "aggregating": "it has closed and is being aggregated",
        "done": "it is done",
        "failed": f"it failed: {round_.reason}",
    }[round_.state]
    raise Gone(
        "round-closed",
        f"Round {round_.number} accepts no more updates: {fate}. The federation is {federation.state}.",
        next_step="GET /v1/task returns what to do next.",
    )


def upload_ended() -> Conflict:
    """Return the error for a request whose upload no longer exists."""
    return Conflict("upload-replaced", "A newer upload of this client, or the end of the round, ended this one.")


def find(session: Session, round_id: int, identity: Identity) -> Transfer | None:
    """Return the client's upload in progress, if any."""
    return session.query(Transfer).filter_by(round_id=round_id, client_id=identity.client_id).one_or_none()


def start(
    session: Session, ctx: Context, identity: Identity, round_id: int, *, resumable: bool, length: int, digest: str = ""
) -> Transfer:
    """Start an upload, replacing an earlier one of the client."""
    old = find(session, round_id, identity)
    if old is not None:
        remove_in(session, old)
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


def append(session: Session, progress: Progress, pieces: list[Piece]) -> int:
    """Append bytes and return the new size.

    An upload counts as growing only beyond the largest size the client ever reached: otherwise a client that keeps
    starting over could hold the round open past its deadline with next to nothing.
    """
    size_bytes = blobs.append(session, progress.blob_id, progress.size_bytes, pieces)
    if not pieces:
        return size_bytes
    times = {"given_id": progress.transfer_id, "touched_uptime": progress.uptime}
    if size_bytes > progress.most_bytes:
        mine = {"given_round_id": progress.round_id, "given_client_id": progress.client_id}
        session.execute(_RAISE_MOST, mine | {"most_bytes": size_bytes})
        session.execute(_GREW, times | {"grown_uptime": progress.uptime})
    else:
        session.execute(_TOUCH, times)
    return size_bytes


def remove_in(session: Session, transfer: Transfer) -> None:
    """Remove an upload in the caller's transaction, unless it just became an update or is already gone."""
    removed = session.execute(delete(Transfer).where(Transfer.id == transfer.id))
    if removed.rowcount:  # type: ignore[attr-defined]  # a DELETE's result has it
        blobs.remove_in(session, transfer.blob_id)


def remove(ctx: Context, transfer_id: str) -> None:
    """Remove an upload by its id, if it still exists."""
    with ctx.db.write() as session:
        transfer = session.get(Transfer, transfer_id)
        if transfer is not None:
            remove_in(session, transfer)


def accept(
    ctx: Context,
    identity: Identity,
    round_id: int,
    transfer_id: str,
    valid: ValidBody,
    pieces: list[Piece],
) -> UpdateReceipt:
    """Turn a complete, valid upload into the client's update and advance the round. A repeat gets the same receipt.

    `pieces` are its last bytes, if they have not been recorded yet.
    """
    try:
        report = TrainingReport.model_validate_json(valid.metadata.get("report", ""))
    except ValidationError as error:
        raise InvalidInput(
            "invalid-report",
            "The metadata contains no valid training report.",
            next_step="Put the report as JSON under 'report' in the safetensors metadata.",
        ) from error
    with ctx.db.write() as session:
        # The federation's lock serializes the last two uploads: the second one sees the first.
        federation = session.get_one(Federation, identity.federation_id, with_for_update=LOCK)
        round_ = lock_participant(session, identity, round_id)
        if session.get(Update, (round_id, identity.client_id)) is None:
            require_current_client(session, identity)  # its token was checked when the request started
            require_open_round(session, round_)
            progress = lock(session, transfer_id)
            size_bytes = blobs.append(session, progress.blob_id, progress.size_bytes, pieces)
            if size_bytes != valid.size_bytes:  # another request has appended bytes that nobody checked
                raise upload_ended()
            blob = blobs.seal(session, progress.blob_id, valid.digest)
            update = Update(
                round_id=round_id,
                client_id=identity.client_id,
                blob_id=blob.id,
                digest=valid.digest,
                size_bytes=blob.size_bytes,
                report=report.model_dump_json(),
                received_at=ctx.clock(),
            )
            session.add(update)
            session.execute(delete(Transfer).where(Transfer.id == transfer_id))
            session.get_one(Client, identity.client_id).heard_uptime = uptime(session)  # the next round may open now
            session.flush()
            wake_aggregator(federation)  # fold this update now, not when the round closes
            advance(session, ctx, federation)
            return _receipt(session, update)
    return repeated_receipt(ctx, identity, round_id, valid.digest)  # another request of the same client was first


def repeated_receipt(ctx: Context, identity: Identity, round_id: int, digest: str | None) -> UpdateReceipt:
    """Return the receipt of the accepted update for a repeat of the same bytes; raise Conflict for other bytes."""
    with ctx.db.read() as session:
        update = session.get_one(Update, (round_id, identity.client_id))
        if update.digest != digest:
            which = "A different" if digest else "An"
            raise Conflict(
                "already-uploaded",
                f"{which} update of this client was already accepted for this round.",
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
