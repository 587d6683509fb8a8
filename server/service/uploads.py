"""Uploads: whole (PUT) or in resumable parts (POST, HEAD, PATCH); checked as they stream in, accepted exactly once."""

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from pydantic import ValidationError
from sqlalchemy import delete
from sqlalchemy.orm import Session

from server.core.errors import Conflict, Gone, InvalidInput, NotFound, TooLarge
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
    length_bytes: int | None  # None: the client has not said
    complete: bool
    max_bytes: int = field(default=0, compare=False)
    upload_id: str | None = field(default=None, compare=False)  # None: none is under way


class OffsetMismatch(Conflict):
    """A part that does not begin where the stored bytes end."""

    def __init__(self, offset_bytes: int, provided_bytes: int) -> None:
        super().__init__(
            "offset-mismatch",
            f"The part begins at byte {provided_bytes}; the next byte expected is {offset_bytes}.",
            next_step="Continue from there; HEAD returns the offset at any time.",
        )
        self.offset_bytes, self.provided_bytes = offset_bytes, provided_bytes


class InconsistentLength(InvalidInput):
    """A request that contradicts what is known of the upload's length."""

    def __init__(self, message: str) -> None:
        super().__init__(
            "inconsistent-length",
            message,
            next_step="DELETE the upload, or start another one with POST, to begin again.",
        )


class UpdateTooLarge(TooLarge):
    """More bytes than an update of the round can have."""

    def __init__(self, spec: Spec) -> None:
        super().__init__("too-large", f"An update of this round has at most {spec.max_total_bytes} bytes.")
        self.max_bytes = spec.max_total_bytes


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
                raise UpdateTooLarge(self._spec)
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
            raise UpdateTooLarge(self._spec)
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
    """One POST or PATCH of a resumable upload; what has been fed is kept, whatever happens to the request.

    The length and the digest of the whole may be left out; whichever request brings them, they are kept for the rest.
    """

    def __init__(
        self,
        ctx: Context,
        identity: Identity,
        round_id: int,
        offset: int,
        length: int | None = None,
        digest: str | None = None,
        *,
        is_last: bool | None = None,
        upload_id: str | None = None,
        creates: bool = False,
    ) -> None:
        """`is_last` says whether the upload ends with this part; None means that it ends when it has its length.

        With `creates` another upload takes the place of one under way. With `upload_id` it has to be the one under way.
        """
        self._ctx, self._identity, self._round_id = ctx, identity, round_id
        self._digest, self._is_last = digest, is_last
        self._transfer_id: str | None = None
        with ctx.db.write() as session:
            round_ = _lock_part(session, identity, round_id)
            self._spec = _spec(session, round_)
            if length is not None and length > self._spec.max_total_bytes:
                raise UpdateTooLarge(self._spec)
            if session.get(Update, (round_id, identity.client_id)) is not None:
                return  # `finish` compares the digests
            _refuse_closed(session, round_)
            found = None if creates else _under_way(session, round_id, identity, upload_id)
            if found is None or _is_another(found, digest):
                if offset != 0:
                    raise OffsetMismatch(0, offset)
                found = _new_transfer(
                    session, ctx, identity, round_id, resumable=True, length=length or 0, digest=digest or ""
                )
            stored = session.get_one(Blob, found.blob_id).size_bytes
            if stored != offset:
                raise OffsetMismatch(stored, offset)
            self._length, self._digest = _agree(found, stored, length, digest)
            self._transfer_id, self._blob_id, self._position = found.id, found.blob_id, stored

    def feed(self, data: bytes) -> None:
        """Store the next bytes."""
        if self._transfer_id is None:
            return
        end = self._position + len(data)
        if self._length and end > self._length:
            raise InvalidInput("too-many-bytes", f"More bytes than the Upload-Length of {self._length}.")
        if end > self._spec.max_total_bytes:
            raise UpdateTooLarge(self._spec)
        pieces = blobs.stage(self._ctx.db, self._blob_id, data)
        with self._ctx.db.write() as session:
            participant, transfer = _lock_transfer(session, self._identity, self._round_id, self._transfer_id)
            stored = session.get_one(Blob, transfer.blob_id, with_for_update=LOCK).size_bytes
            if stored != self._position:  # another request is appending to the same upload
                raise OffsetMismatch(stored, self._position)
            self._position = _append(session, participant, transfer, pieces)

    @property
    def upload_id(self) -> str | None:
        """The upload's id; None when the update was accepted before."""
        return self._transfer_id

    @property
    def max_bytes(self) -> int:
        """The most bytes that the upload may have."""
        return self._spec.max_total_bytes

    @property
    def ends_upload(self) -> bool:
        """Whether the upload is whole with what has been fed."""
        if self._transfer_id is None:
            return True
        return 0 < self._length == self._position if self._is_last is None else self._is_last

    def finish(self) -> UpdateReceipt | UploadStatus:
        """The receipt when the upload is whole and valid, else how far it is."""
        if self._transfer_id is None:
            return _repeated(self._ctx, self._identity, self._round_id, self._digest)
        if not self.ends_upload:
            return UploadStatus(self._position, self._length or None, False, self.max_bytes, self._transfer_id)
        if self._length and self._position != self._length:
            raise InconsistentLength(
                f"The upload was completed with {self._position} bytes; its length was given as {self._length}."
            )
        with self._ctx.db.read() as session:
            transfer = session.get(Transfer, self._transfer_id)
        if transfer is None:
            return _ended(self._ctx, self._identity, self._round_id, self._digest)
        checker, sha = Checker(self._spec), hashlib.sha256()
        try:
            for piece in blobs.read(self._ctx.db, transfer.blob_id):
                sha.update(piece)
                _check(partial(checker.feed, piece))
            if self._digest and sha.hexdigest() != self._digest:
                raise InvalidInput(
                    "digest-mismatch",
                    "The upload does not match its Repr-Digest.",
                    next_step="Start again from byte 0.",
                )
            metadata = _check(checker.finish)
            return _accept(self._ctx, self._identity, self._round_id, self._transfer_id, sha.hexdigest(), metadata)
        except InvalidInput:
            with self._ctx.db.write() as session:  # what is wrong stays wrong
                transfer = session.get(Transfer, self._transfer_id)
                if transfer is not None:
                    drop_transfer(session, transfer)
            raise


def status(ctx: Context, identity: Identity, round_id: int, upload_id: str | None = None) -> UploadStatus:
    """Where a resumable upload should continue."""
    with ctx.db.read() as session:
        round_ = round_of(session, identity, round_id)
        most = _spec(session, round_).max_total_bytes
        update = session.get(Update, (round_id, identity.client_id))
        if update is not None:
            return UploadStatus(update.size_bytes, update.size_bytes, True, most)
        _refuse_closed(session, round_)
        found = _under_way(session, round_id, identity, upload_id)
        if found is None:
            return UploadStatus(0, None, False, most)
        stored = session.get_one(Blob, found.blob_id).size_bytes
        return UploadStatus(stored, found.length_bytes or None, False, most, found.id)


def cancel(ctx: Context, identity: Identity, round_id: int, upload_id: str | None = None) -> None:
    """Drop the upload under way, if there is one. An update that was accepted stays."""
    with ctx.db.write() as session:
        round_ = _lock_part(session, identity, round_id)
        if session.get(Update, (round_id, identity.client_id)) is not None:
            raise Conflict("already-uploaded", "The update was accepted and can no longer be cancelled.")
        _refuse_closed(session, round_)
        found = _transfer_of(session, round_id, identity)
        _require(found, upload_id)
        if found is not None:
            drop_transfer(session, found)


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


def _under_way(session: Session, round_id: int, identity: Identity, upload_id: str | None) -> Transfer | None:
    """The client's resumable upload; one that is named has to be there."""
    found = _transfer_of(session, round_id, identity)
    if found is not None and not found.resumable:
        found = None
    _require(found, upload_id)
    return found


def _require(found: Transfer | None, upload_id: str | None) -> None:
    if upload_id is not None and (found is None or found.id != upload_id):
        raise NotFound(
            "no-such-upload",
            "This upload was cancelled, replaced by a newer one, or refused.",
            next_step="Start another one with POST or PUT …/update.",
        )


def _is_another(transfer: Transfer, digest: str | None) -> bool:
    """Whether the digest is that of another body than the one under way."""
    return bool(digest and transfer.digest and digest != transfer.digest)


def _agree(transfer: Transfer, stored: int, length: int | None, digest: str | None) -> tuple[int, str]:
    """The length and digest of the upload, 0 and "" while unknown; what a request adds is kept for the next ones."""
    if length is not None and transfer.length_bytes and length != transfer.length_bytes:
        raise InconsistentLength(
            f"The request gives a length of {length} bytes, an earlier one {transfer.length_bytes}."
        )
    if length is not None and length < stored:
        raise InconsistentLength(f"The request gives a length of {length} bytes; {stored} are stored already.")
    transfer.length_bytes = transfer.length_bytes or length or 0
    transfer.digest = transfer.digest or digest or ""
    return transfer.length_bytes, transfer.digest


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


def _ended(ctx: Context, identity: Identity, round_id: int, digest: str | None) -> UpdateReceipt:
    """The receipt if another request has brought the same upload to its end; else why there is none."""
    with ctx.db.read() as session:
        if session.get(Update, (round_id, identity.client_id)) is None:
            _refuse_closed(session, round_of(session, identity, round_id))
            raise _replaced()
    return _repeated(ctx, identity, round_id, digest)


def _repeated(ctx: Context, identity: Identity, round_id: int, digest: str | None) -> UpdateReceipt:
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
