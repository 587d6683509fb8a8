"""An update uploaded whole, in one request; checked as it streams in."""

import hashlib
from functools import partial

from server.core.errors import InvalidInput
from server.service import transfers
from server.service.context import Context
from server.service.enrolment import Identity
from server.store import blobs
from server.store.tables import Update
from shared.schemas import UpdateReceipt
from shared.wire import Checker


class Upload:
    """One request's upload. `feed` its bytes, then `finish`; `abandon` when the request is torn."""

    def __init__(self, ctx: Context, identity: Identity, round_id: int, digest: str | None, length: int | None) -> None:
        self._ctx, self._identity, self._round_id = ctx, identity, round_id
        self._declared = digest
        self._hash = hashlib.sha256()
        self._received = 0
        self._transfer_id: str | None = None
        with ctx.db.write() as session:
            round_ = transfers.lock_part(session, identity, round_id)
            self._spec = transfers.spec_of(session, round_)
            if length is not None and length > self._spec.max_total_bytes:
                raise transfers.UpdateTooLarge(self._spec)
            self._checker = Checker(self._spec)
            # After acceptance the body is only compared, so that a repeat is answered as the first time.
            if session.get(Update, (round_id, identity.client_id)) is None:
                transfers.refuse_closed(session, round_)
                transfer = transfers.start(session, ctx, identity, round_id, resumable=False, length=length or 0)
                self._transfer_id, self._blob_id = transfer.id, transfer.blob_id

    def feed(self, data: bytes) -> None:
        """Check and store the next bytes."""
        self._received += len(data)
        if self._received > self._spec.max_total_bytes:
            raise transfers.UpdateTooLarge(self._spec)
        self._hash.update(data)
        if self._transfer_id is None:
            return
        transfers.checked(partial(self._checker.feed, data))
        pieces = blobs.stage(self._ctx.db, self._blob_id, data)
        with self._ctx.db.write() as session:
            participant, transfer = transfers.lock(session, self._identity, self._round_id, self._transfer_id)
            transfers.append(session, participant, transfer, pieces)

    def finish(self) -> UpdateReceipt:
        """The body has ended: accept it, or say why not."""
        digest = self._hash.hexdigest()
        if self._declared is not None and self._declared != digest:
            raise InvalidInput(
                "digest-mismatch", "The body does not match its Content-Digest.", next_step="Send it again."
            )
        if self._transfer_id is None:
            return transfers.repeated_receipt(self._ctx, self._identity, self._round_id, digest)
        metadata = transfers.checked(self._checker.finish)
        return transfers.accept(self._ctx, self._identity, self._round_id, self._transfer_id, digest, metadata)

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._transfer_id is not None:
            transfers.discard(self._ctx, self._transfer_id)
