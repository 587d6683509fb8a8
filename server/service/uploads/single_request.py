"""An update uploaded in one request, validated while it streams in."""

import hashlib

from server.core.errors import InvalidInput
from server.service.context import Context, Identity
from server.service.uploads import transfers
from server.service.uploads.validation import Validation
from server.store import blobs
from shared.contract.messages import UpdateReceipt


class SingleRequestUpload:
    """The upload of one request. `feed` its bytes, then `finish`; `abandon` it if the request is cut off."""

    def __init__(self, ctx: Context, identity: Identity, round_id: int, digest: str | None, length: int | None) -> None:
        self._ctx, self._identity, self._round_id = ctx, identity, round_id
        self._declared = digest
        self._received = 0
        self._repeated = hashlib.sha256()
        self._transfer_id: str | None = None
        with ctx.db.write(durable=False) as session:
            self._spec, is_accepted = transfers.check_opening(session, identity, round_id, length)
            self._validation = Validation(self._spec)
            if not is_accepted:  # else the body is only compared, so that a repeat gets the same answer
                transfer = transfers.start(session, ctx, identity, round_id, resumable=False, length=length or 0)
                self._transfer_id = transfer.id
                self._writer = blobs.Writer(ctx.db, transfer.blob_id)

    def feed(self, data: bytes | memoryview) -> None:
        """Validate and store the next bytes."""
        self._take(data)
        if self._transfer_id is not None and self._writer.is_due:
            with self._writer.flushed() as pieces, self._ctx.db.write(durable=False) as session:
                transfers.append(session, transfers.lock(session, self._transfer_id), pieces)

    def _take(self, data: bytes | memoryview) -> None:
        self._received += len(data)
        if self._received > self._spec.max_total_bytes:
            raise transfers.UpdateTooLarge(self._spec)
        if self._transfer_id is None:
            self._repeated.update(data)
            return
        self._validation.feed(data)
        self._writer.write(data)

    def finish(self, rest: bytes | memoryview = b"") -> UpdateReceipt:
        """Accept the complete body, of which `rest` are the last bytes, or raise."""
        self._take(rest)
        digest = self._repeated.hexdigest() if self._transfer_id is None else self._validation.digest
        if self._declared is not None and self._declared != digest:
            raise InvalidInput(
                "digest-mismatch", "The body does not match its Content-Digest.", next_step="Send it again."
            )
        if self._transfer_id is None:
            return transfers.repeated_receipt(self._ctx, self._identity, self._round_id, digest)
        valid = self._validation.finish()
        with self._writer.flushed() as pieces:
            return transfers.accept(self._ctx, self._identity, self._round_id, self._transfer_id, valid, pieces)

    def abandon(self) -> None:
        """Remove what has been stored."""
        if self._transfer_id is not None:
            transfers.remove(self._ctx, self._transfer_id)
            self._writer.discard()
