"""Uploads: whole (PUT) or in resumable parts (HEAD, PATCH); checked as they stream in, accepted exactly once."""

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from server.store.tables import Blob, Client, Federation, Participant, Round, Transfer, Update
from shared.problems import WireError
from shared.schemas import TrainingReport, UpdateReceipt
from shared.wire import Checker, Spec

Result = TypeVar("Result")


@dataclass(frozen=True)
class UploadStatus:
    """How much of a resumable upload is stored."""

    offset_bytes: int
    length_bytes: int | None
    complete: bool


class OffsetMismatch(Conflict):
    """A part that does not go on where the stored bytes end."""

    def __init__(self, offset_bytes: int) -> None:
        super().__init__(
            "offset-mismatch",
            f"The next byte expected is {offset_bytes}.",
            next_step="Go on from there; HEAD tells the offset at any time.",
        )
        self.offset_bytes = offset_bytes


class Upload:
    """One request's upload. `feed` its bytes, then `finish`; `abandon` when the request is torn."""

    def __init__(self, ctx: Context, identity: Identity, round_id: int, digest: str | None, length: int | None) -> None:
        self._ctx, self._identity, self._round_id = ctx, identity, round_id
        self._declared = digest
        self._hash = hashlib.sha256()
        self._received = 0
        self._transfer_id: str | None = None
        with ctx.db.write() as session:
            round_ = _lock_part(session, identity, round_id)
            self._spec = _spec(session, round_)
            if length is not None and length > self._spec.max_total_bytes:
                raise _too_large(self._spec)
            self._checker = Checker(self._spec)
            # After acceptance the body is only compared, so that a repeat is answered as the first time.
            self._repeat = session.get(Update, (round_id, identity.client_id)) is not None
            if not self._repeat:
                _refuse_closed(session, round_)
                transfer = _new_transfer(session, ctx, identity, round_id, resumable=False, length=length or 0)
                self._transfer_id, self._blob_id = transfer.id, transfer.blob_id

    def feed(self, data: bytes) -> None:
        """Check and store the next bytes."""
        self._received += len(data)
        if self._received > self._spec.max_total_bytes:
            raise _too_large(self._spec)
        self._hash.update(data)
        if self._transfer_id is None:
            return
        _check(partial(self._checker.feed, data))
        pieces = blobs.stage(self._ctx.db, self._blob_id, data)
        with self._ctx.db.write() as session:
            participant, transfer = _lock_transfer(session, self._identity, self._round_id, self._transfer_id)
            _append(session, participant, transfer, pieces)

    def finish(self) -> UpdateReceipt:
        """The body has ended: accept it, or say why not."""
        digest = self._hash.hexdigest()
        if self._declared is not None and self._declared != digest:
            raise InvalidInput(
                "digest-mismatch", "The body does not match its Content-Digest.", next_step="Send it again."
            )
        if self._transfer_id is None:
            return _repeated(self._ctx, self._identity, self._round_id, digest)
        metadata = _check(self._checker.finish)
        return _accept(self._ctx, self._identity, self._round_id, self._transfer_id, digest, metadata)

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._transfer_id is not None:
            with self._ctx.db.write() as session:
                transfer = session.get(Transfer, self._transfer_id)
                if transfer is not None:
                    drop_transfer(session, transfer)


class UploadPart:
    """One PATCH of a resumable upload; what has been fed is kept, whatever happens to the request."""

    def __init__(self, ctx: Context, identity: Identity, round_id: int, offset: int, length: int, digest: str) -> None:
        self._ctx, self._identity, self._round_id = ctx, identity, round_id
        self._length, self._digest = length, digest
        self._transfer_id: str | None = None
        with ctx.db.write() as session:
            round_ = _lock_part(session, identity, round_id)
            self._spec = _spec(session, round_)
            if length > self._spec.max_total_bytes:
                raise _too_large(self._spec)
            if session.get(Update, (round_id, identity.client_id)) is not None:
                return  # `finish` compares the digests
            _refuse_closed(session, round_)
            found = _transfer_of(session, round_id, identity)
            if found is None or not found.resumable or (found.digest, found.length_bytes) != (digest, length):
                if offset != 0:
                    raise OffsetMismatch(0)
                found = _new_transfer(session, ctx, identity, round_id, resumable=True, length=length, digest=digest)
            self._transfer_id, self._blob_id = found.id, found.blob_id
            stored = session.get_one(Blob, found.blob_id).size_bytes
            if stored != offset:
                raise OffsetMismatch(stored)
            self._position = stored

    def feed(self, data: bytes) -> None:
        """Store the next bytes."""
        if self._transfer_id is None:
            return
        if self._position + len(data) > self._length:
            raise InvalidInput("too-many-bytes", f"More bytes than the Upload-Length of {self._length}.")
        pieces = blobs.stage(self._ctx.db, self._blob_id, data)
        with self._ctx.db.write() as session:
            participant, transfer = _lock_transfer(session, self._identity, self._round_id, self._transfer_id)
            stored = session.get_one(Blob, transfer.blob_id, with_for_update=LOCK).size_bytes
            if stored != self._position:  # another request is appending to the same upload
                raise OffsetMismatch(stored)
            self._position = _append(session, participant, transfer, pieces)

    def finish(self) -> UpdateReceipt | UploadStatus:
        """The receipt when the upload is whole and valid, else how far it is."""
        if self._transfer_id is None:
            return _repeated(self._ctx, self._identity, self._round_id, self._digest)
        if self._position < self._length:
            return UploadStatus(self._position, self._length, complete=False)
        with self._ctx.db.read() as session:
            transfer = session.get(Transfer, self._transfer_id)
        if transfer is None:
            return _ended(self._ctx, self._identity, self._round_id, self._digest)
        checker, sha = Checker(self._spec), hashlib.sha256()
        try:
            for piece in blobs.read(self._ctx.db, transfer.blob_id):
                sha.update(piece)
                _check(partial(checker.feed, piece))
            if sha.hexdigest() != self._digest:
                raise InvalidInput(
                    "digest-mismatch",
                    "The upload does not match its Repr-Digest.",
                    next_step="Start again from byte 0.",
                )
            metadata = _check(checker.finish)
            return _accept(self._ctx, self._identity, self._round_id, self._transfer_id, self._digest, metadata)
        except InvalidInput:
            with self._ctx.db.write() as session:  # what is wrong stays wrong
                transfer = session.get(Transfer, self._transfer_id)
                if transfer is not None:
                    drop_transfer(session, transfer)
            raise


def status(ctx: Context, identity: Identity, round_id: int) -> UploadStatus:
    """Where a resumable upload should go on."""
    with ctx.db.read() as session:
        round_ = round_of(session, identity, round_id)
        update = session.get(Update, (round_id, identity.client_id))
        if update is not None:
            return UploadStatus(update.size_bytes, update.size_bytes, complete=True)
        _refuse_closed(session, round_)
        found = _transfer_of(session, round_id, identity)
        if found is None or not found.resumable:
            return UploadStatus(0, None, complete=False)
        stored = session.get_one(Blob, found.blob_id).size_bytes
        return UploadStatus(stored, found.length_bytes, complete=False)


def drop_transfer(session: Session, transfer: Transfer) -> None:
    """Forget an upload that did not become an update, unless it just became one, or another process was first."""
    dropped = session.execute(delete(Transfer).where(Transfer.id == transfer.id))
    if dropped.rowcount:  # type: ignore[attr-defined]  # a DELETE's result has it
        blobs.drop(session, transfer.blob_id)


def _lock_part(session: Session, identity: Identity, round_id: int) -> Round:
    """The round, with this client's part in it locked: its requests queue up, and each sees what the last one did."""
    round_ = round_of(session, identity, round_id)
    session.get_one(Participant, (round_id, identity.client_id), with_for_update=LOCK)
    return round_


def _lock_transfer(
    session: Session, identity: Identity, round_id: int, transfer_id: str
) -> tuple[Participant, Transfer]:
    """The client's part first, as in `_lock_part`, then the upload; refused when the upload is over."""
    participant = session.get_one(Participant, (round_id, identity.client_id), with_for_update=LOCK)
    transfer = session.get(Transfer, transfer_id, with_for_update=LOCK)
    if transfer is None:
        raise _replaced()
    return participant, transfer


def _append(session: Session, participant: Participant, transfer: Transfer, pieces: list[blobs.Piece]) -> int:
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


def _spec(session: Session, round_: Round) -> Spec:
    return update_spec(session.get_one(Federation, round_.federation_id).plan, round_.facts)


def _too_large(spec: Spec) -> TooLarge:
    return TooLarge("too-large", f"An update of this round has at most {spec.max_total_bytes} bytes.")


def _replaced() -> Conflict:
    return Conflict("upload-replaced", "A newer upload of this client, or the end of the round, ended this one.")


def _refuse_closed(session: Session, round_: Round) -> None:
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


def _transfer_of(session: Session, round_id: int, identity: Identity) -> Transfer | None:
    return session.query(Transfer).filter_by(round_id=round_id, client_id=identity.client_id).one_or_none()


def _new_transfer(
    session: Session, ctx: Context, identity: Identity, round_id: int, *, resumable: bool, length: int, digest: str = ""
) -> Transfer:
    old = _transfer_of(session, round_id, identity)
    if old is not None:
        drop_transfer(session, old)
    now = ctx.clock()
    transfer = Transfer(
        id=uuid.uuid4().hex,
        round_id=round_id,
        client_id=identity.client_id,
        blob_id=blobs.begin_blob(session),
        resumable=resumable,
        length_bytes=length,
        digest=digest,
        started_at=now,
        touched_uptime=uptime(session),
    )
    session.add(transfer)
    session.flush()
    return transfer


def _check(step: Callable[[], Result]) -> Result:
    try:
        return step()
    except WireError as error:
        raise InvalidInput(error.code, error.message, next_step=error.next_step) from error


def _ended(ctx: Context, identity: Identity, round_id: int, digest: str) -> UpdateReceipt:
    """The receipt if another request has brought the same upload to its end; else why there is none."""
    with ctx.db.read() as session:
        if session.get(Update, (round_id, identity.client_id)) is None:
            _refuse_closed(session, round_of(session, identity, round_id))
            raise _replaced()
    return _repeated(ctx, identity, round_id, digest)


def _repeated(ctx: Context, identity: Identity, round_id: int, digest: str) -> UpdateReceipt:
    with ctx.db.read() as session:
        update = session.get_one(Update, (round_id, identity.client_id))
        if update.digest != digest:
            raise Conflict(
                "already-uploaded",
                "Another update of this client was accepted for this round.",
                next_step="It cannot be replaced; go on with the next task.",
            )
        return _receipt(session, update)


def _receipt(session: Session, update: Update) -> UpdateReceipt:
    return UpdateReceipt(
        round=session.get_one(Round, update.round_id).number,
        digest=update.digest,
        size_bytes=update.size_bytes,
        received_at=update.received_at,
    )


def _accept(
    ctx: Context, identity: Identity, round_id: int, transfer_id: str, digest: str, metadata: dict[str, str]
) -> UpdateReceipt:
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
        round_ = _lock_part(session, identity, round_id)
        if session.get(Update, (round_id, identity.client_id)) is None:
            refuse_outdated(session, identity)  # its token was checked when the request began
            _refuse_closed(session, round_)
            transfer = session.get(Transfer, transfer_id, with_for_update=LOCK)
            if transfer is None:
                raise _replaced()
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
    return _repeated(ctx, identity, round_id, digest)  # the same client's other request was first
