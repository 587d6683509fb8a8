"""Resumable uploads: parts (POST, PATCH), status (HEAD) and cancellation (DELETE)."""

from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from server.core.errors import Conflict, InvalidInput, NotFound
from server.service.context import Context, Identity
from server.service.queries import round_of
from server.service.uploads import transfers
from server.service.uploads.validation import Validation
from server.store import blobs
from server.store.tables import Blob, Transfer, Update
from shared.contract.errors import DistransError
from shared.contract.messages import UpdateReceipt


@dataclass(frozen=True)
class UploadStatus:
    """How much of a resumable upload is stored."""

    offset_bytes: int
    length_bytes: int | None  # None: not known yet
    complete: bool
    max_bytes: int = field(default=0, compare=False)
    upload_id: str | None = field(default=None, compare=False)  # None: none in progress


class OffsetMismatch(Conflict):
    """A part that does not start where the stored bytes end."""

    def __init__(self, offset_bytes: int, provided_bytes: int) -> None:
        super().__init__(
            "offset-mismatch",
            f"The part starts at byte {provided_bytes}; expected byte {offset_bytes}.",
            next_step="Continue from there; HEAD returns the offset at any time.",
        )
        self.offset_bytes, self.provided_bytes = offset_bytes, provided_bytes


class InconsistentLength(InvalidInput):
    """A request that contradicts the known length of the upload."""

    def __init__(self, message: str) -> None:
        super().__init__(
            "inconsistent-length",
            message,
            next_step="Start over: DELETE the upload, or create a new one with POST.",
        )


class UploadPart:
    """One POST or PATCH of a resumable upload. `feed` its bytes, then `finish`, or `save` if the request is cut off.

    Any request may give the length and digest of the whole upload; later requests may then omit them.
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
        """Begin a part. `is_last` says whether the upload ends with it; None: it ends when its length is reached.

        `creates` replaces an upload in progress; `upload_id` must be the one in progress.
        """
        self._ctx, self._identity, self._round_id = ctx, identity, round_id
        self._digest, self._is_last = digest, is_last
        self._transfer_id: str | None = None
        self._position = 0
        self._fault: InvalidInput | None = None
        with ctx.db.write(durable=False) as session:
            self._spec, is_accepted = transfers.check_opening(session, identity, round_id, length)
            if is_accepted:
                return  # `finish` compares the digests
            found = None if creates else _under_way(session, round_id, identity, upload_id)
            if found is None or (upload_id is None and _is_another(found, digest)):
                if offset != 0:
                    raise OffsetMismatch(0, offset)
                found = transfers.start(
                    session, ctx, identity, round_id, resumable=True, length=length or 0, digest=digest or ""
                )
            stored = session.get_one(Blob, found.blob_id).size_bytes
            if stored != offset:
                raise OffsetMismatch(stored, offset)
            self._length, self._digest = _agree(found, stored, length, digest)
            self._transfer_id, self._position, self._recorded = found.id, stored, stored
            self._writer = blobs.Writer(ctx.db, found.blob_id)
        # A body that this request sends whole is validated on the way, any other one once it is complete.
        self._validation = Validation(self._spec) if self._position == 0 else None

    def feed(self, data: bytes | memoryview, *, is_last: bool = False) -> None:
        """Store the next bytes; from time to time, `save` them. The last ones are left to `finish`, if possible."""
        end = self._position + len(data)
        if self._transfer_id is None:  # already accepted; even so, a repeat may not be too large
            if end > self._spec.max_total_bytes:
                raise transfers.UpdateTooLarge(self._spec)
            self._position = end
            return
        if self._length and end > self._length:
            raise InvalidInput("too-many-bytes", f"The body exceeds the Upload-Length of {self._length} bytes.")
        if end > self._spec.max_total_bytes:
            raise transfers.UpdateTooLarge(self._spec)
        self._writer.write(data)
        self._position = end
        self._validate(data)
        is_complete = is_last and self.ends_upload and self._length in (0, self._position)
        if self._writer.is_due and not is_complete:
            self.save()

    def save(self) -> None:
        """Keep the bytes fed so far, whatever happens to this request."""
        if self._transfer_id is None:
            return
        try:
            with self._writer.flushed() as pieces, self._ctx.db.write(durable=False) as session:
                progress = transfers.lock(session, self._transfer_id)
                if progress.size_bytes != self._recorded:  # another request is appending to the same upload
                    raise OffsetMismatch(progress.size_bytes, self._recorded)
                self._recorded = transfers.append(session, progress, pieces)
        except DistransError:
            self._writer.discard()
            raise

    def _validate(self, data: bytes | memoryview) -> None:
        if self._validation is None or self._fault is not None:
            return
        try:
            self._validation.feed(data)
        except InvalidInput as error:
            self._fault = error  # for `finish`: an upload is refused once it is complete

    @property
    def upload_id(self) -> str | None:
        """Id of the upload; None if the update was already accepted."""
        return self._transfer_id

    @property
    def max_bytes(self) -> int:
        """Maximum size of the upload."""
        return self._spec.max_total_bytes

    @property
    def ends_upload(self) -> bool:
        """Whether the upload is complete with the bytes fed so far."""
        if self._transfer_id is None:
            return True
        return 0 < self._length == self._position if self._is_last is None else self._is_last

    def finish(self) -> UpdateReceipt | UploadStatus:
        """Return the receipt if the upload is complete and valid, else its status."""
        if self._transfer_id is None:
            return transfers.repeated_receipt(self._ctx, self._identity, self._round_id, self._digest)
        if not self.ends_upload:
            self.save()
            self._ctx.db.sync()  # the answer promises that these bytes are kept
            return UploadStatus(self._position, self._length or None, False, self.max_bytes, self._transfer_id)
        if self._length and self._position != self._length:
            raise InconsistentLength(
                f"The upload was completed with {self._position} bytes, but its length is {self._length}."
            )
        with self._ctx.db.read() as session:
            transfer = session.get(Transfer, self._transfer_id)
        if transfer is None:
            return _ended(self._ctx, self._identity, self._round_id, self._digest)
        try:
            if self._validation is None:
                self.save()
            validation = self._validation or self._read_back(transfer.blob_id)
            if self._fault is not None:
                raise self._fault
            if self._digest and validation.digest != self._digest:
                raise InvalidInput(
                    "digest-mismatch",
                    "The upload does not match its Repr-Digest.",
                    next_step="Start over from byte 0.",
                )
            valid = validation.finish()
            with self._writer.flushed() as pieces:
                return transfers.accept(self._ctx, self._identity, self._round_id, self._transfer_id, valid, pieces)
        except InvalidInput:
            transfers.remove(self._ctx, self._transfer_id)  # an invalid upload cannot become valid
            self._writer.discard()
            raise
        except DistransError:
            self._writer.discard()
            raise

    def _read_back(self, blob_id: str) -> Validation:
        """Validate an upload of several requests."""
        validation = Validation(self._spec)
        for piece in blobs.read(self._ctx.db, blob_id):
            validation.feed(piece)
        return validation


def status(ctx: Context, identity: Identity, round_id: int, upload_id: str | None = None) -> UploadStatus:
    """Return how much is stored, i.e. where to continue."""
    with ctx.db.read() as session:
        round_ = round_of(session, identity, round_id)
        max_bytes = transfers.spec_of(session, round_).max_total_bytes
        update = session.get(Update, (round_id, identity.client_id))
        if update is not None:
            return UploadStatus(update.size_bytes, update.size_bytes, True, max_bytes)
        transfers.require_open_round(session, round_)
        found = _under_way(session, round_id, identity, upload_id)
        if found is None:
            return UploadStatus(0, None, False, max_bytes)
        stored = session.get_one(Blob, found.blob_id).size_bytes
    ctx.db.sync()  # as in `UploadPart.finish`
    return UploadStatus(stored, found.length_bytes or None, False, max_bytes, found.id)


def cancel(ctx: Context, identity: Identity, round_id: int, upload_id: str | None = None) -> None:
    """Remove the upload in progress, if any. Raise Conflict if the update was already accepted."""
    with ctx.db.write() as session:
        round_ = transfers.lock_participant(session, identity, round_id)
        if session.get(Update, (round_id, identity.client_id)) is not None:
            raise Conflict("already-uploaded", "The update was accepted and can no longer be cancelled.")
        transfers.require_open_round(session, round_)
        found = transfers.find(session, round_id, identity)
        _require(found, upload_id)
        if found is not None:
            transfers.remove_in(session, found)


def _under_way(session: Session, round_id: int, identity: Identity, upload_id: str | None) -> Transfer | None:
    """Return the client's resumable upload; raise unless it is the one with `upload_id`, if given."""
    found = transfers.find(session, round_id, identity)
    if found is not None and not found.resumable:
        found = None
    _require(found, upload_id)
    return found


def _require(found: Transfer | None, upload_id: str | None) -> None:
    if upload_id is not None and (found is None or found.id != upload_id):
        raise NotFound(
            "no-such-upload",
            "This upload was cancelled, replaced by a newer one, or refused.",
            next_step="Start a new one with POST or PUT …/update.",
        )


def _is_another(transfer: Transfer, digest: str | None) -> bool:
    """Return whether the digest belongs to a different body than the one in progress."""
    return bool(digest and transfer.digest and digest != transfer.digest)


def _agree(transfer: Transfer, stored: int, length: int | None, digest: str | None) -> tuple[int, str]:
    """Store length and digest if the request adds them; return both, 0 and "" while unknown."""
    if length is not None and transfer.length_bytes and length != transfer.length_bytes:
        raise InconsistentLength(
            f"The request gives a length of {length} bytes; an earlier one gave {transfer.length_bytes}."
        )
    if _is_another(transfer, digest):
        raise InvalidInput(
            "digest-changed",
            "Repr-Digest differs from the one this upload started with.",
            next_step="Start a new upload with POST.",
        )
    if length is not None and length < stored:
        raise InconsistentLength(f"The request gives a length of {length} bytes, but {stored} are already stored.")
    transfer.length_bytes = transfer.length_bytes or length or 0
    transfer.digest = transfer.digest or digest or ""
    return transfer.length_bytes, transfer.digest


def _ended(ctx: Context, identity: Identity, round_id: int, digest: str | None) -> UpdateReceipt:
    """Return the receipt if another request has completed the same upload; else raise."""
    with ctx.db.read() as session:
        if session.get(Update, (round_id, identity.client_id)) is None:
            transfers.require_open_round(session, round_of(session, identity, round_id))
            raise transfers.upload_ended()
    return transfers.repeated_receipt(ctx, identity, round_id, digest)
