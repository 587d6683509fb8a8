"""Resumable uploads: an update in parts over several requests (POST, PATCH), with its state (HEAD) and end (DELETE)."""

import hashlib
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.orm import Session

from server.core.errors import Conflict, InvalidInput, NotFound
from server.service import transfers
from server.service.context import Context
from server.service.enrolment import Identity
from server.service.tasks import round_of
from server.store import blobs
from server.store.session import LOCK
from server.store.tables import Blob, Transfer, Update
from shared.schemas import UpdateReceipt
from shared.wire import Checker


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
        self._position = 0
        with ctx.db.write() as session:
            round_ = transfers.lock_part(session, identity, round_id)
            self._spec = transfers.spec_of(session, round_)
            if length is not None and length > self._spec.max_total_bytes:
                raise transfers.UpdateTooLarge(self._spec)
            if session.get(Update, (round_id, identity.client_id)) is not None:
                return  # `finish` compares the digests
            transfers.refuse_closed(session, round_)
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
            self._transfer_id, self._blob_id, self._position = found.id, found.blob_id, stored

    def feed(self, data: bytes) -> None:
        """Store the next bytes."""
        end = self._position + len(data)
        if self._transfer_id is None:  # the update was accepted before; its repetition may not be larger
            if end > self._spec.max_total_bytes:
                raise transfers.UpdateTooLarge(self._spec)
            self._position = end
            return
        if self._length and end > self._length:
            raise InvalidInput("too-many-bytes", f"More bytes than the Upload-Length of {self._length}.")
        if end > self._spec.max_total_bytes:
            raise transfers.UpdateTooLarge(self._spec)
        pieces = blobs.stage(self._ctx.db, self._blob_id, data)
        with self._ctx.db.write() as session:
            participant, transfer = transfers.lock(session, self._identity, self._round_id, self._transfer_id)
            stored = session.get_one(Blob, transfer.blob_id, with_for_update=LOCK).size_bytes
            if stored != self._position:  # another request is appending to the same upload
                raise OffsetMismatch(stored, self._position)
            self._position = transfers.append(session, participant, transfer, pieces)

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
            return transfers.repeated_receipt(self._ctx, self._identity, self._round_id, self._digest)
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
                transfers.checked(partial(checker.feed, piece))
            if self._digest and sha.hexdigest() != self._digest:
                raise InvalidInput(
                    "digest-mismatch",
                    "The upload does not match its Repr-Digest.",
                    next_step="Start again from byte 0.",
                )
            metadata = transfers.checked(checker.finish)
            return transfers.accept(
                self._ctx, self._identity, self._round_id, self._transfer_id, sha.hexdigest(), metadata
            )
        except InvalidInput:
            transfers.discard(self._ctx, self._transfer_id)  # what is wrong stays wrong
            raise


def status(ctx: Context, identity: Identity, round_id: int, upload_id: str | None = None) -> UploadStatus:
    """Where a resumable upload should continue."""
    with ctx.db.read() as session:
        round_ = round_of(session, identity, round_id)
        most = transfers.spec_of(session, round_).max_total_bytes
        update = session.get(Update, (round_id, identity.client_id))
        if update is not None:
            return UploadStatus(update.size_bytes, update.size_bytes, True, most)
        transfers.refuse_closed(session, round_)
        found = _under_way(session, round_id, identity, upload_id)
        if found is None:
            return UploadStatus(0, None, False, most)
        stored = session.get_one(Blob, found.blob_id).size_bytes
        return UploadStatus(stored, found.length_bytes or None, False, most, found.id)


def cancel(ctx: Context, identity: Identity, round_id: int, upload_id: str | None = None) -> None:
    """Drop the upload under way, if there is one. An update that was accepted stays."""
    with ctx.db.write() as session:
        round_ = transfers.lock_part(session, identity, round_id)
        if session.get(Update, (round_id, identity.client_id)) is not None:
            raise Conflict("already-uploaded", "The update was accepted and can no longer be cancelled.")
        transfers.refuse_closed(session, round_)
        found = transfers.find(session, round_id, identity)
        _require(found, upload_id)
        if found is not None:
            transfers.drop(session, found)


def _under_way(session: Session, round_id: int, identity: Identity, upload_id: str | None) -> Transfer | None:
    """The client's resumable upload; one that is named has to be there."""
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
    if _is_another(transfer, digest):
        raise InvalidInput(
            "digest-changed",
            "Repr-Digest is not the one that this upload began with.",
            next_step="Start another upload with POST.",
        )
    if length is not None and length < stored:
        raise InconsistentLength(f"The request gives a length of {length} bytes; {stored} are stored already.")
    transfer.length_bytes = transfer.length_bytes or length or 0
    transfer.digest = transfer.digest or digest or ""
    return transfer.length_bytes, transfer.digest


def _ended(ctx: Context, identity: Identity, round_id: int, digest: str | None) -> UpdateReceipt:
    """The receipt if another request has brought the same upload to its end; else why there is none."""
    with ctx.db.read() as session:
        if session.get(Update, (round_id, identity.client_id)) is None:
            transfers.refuse_closed(session, round_of(session, identity, round_id))
            raise transfers.replaced()
    return transfers.repeated_receipt(ctx, identity, round_id, digest)
