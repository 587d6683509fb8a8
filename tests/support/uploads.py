"""Uploads to the round under way, in one request and in parts."""

from support.desk import Desk, count

from server.service.context import Identity
from server.service.uploads.resumable import UploadPart
from server.service.uploads.single_request import SingleRequestUpload
from server.store.database import Database
from server.store.tables import Blob, BlobChunk, Transfer, Update
from shared.tensors.wire import digest

Sites = tuple[Identity, Identity]


def bytes_in_use(db: Database) -> list[int]:
    """Return the row counts that an unsuccessful upload must not change."""
    return count(db, Blob, BlobChunk, Transfer, Update)


def whole(desk: Desk, who: Identity, body: bytes, round_id: int | None = None) -> SingleRequestUpload:
    """Return a PUT that has received all its bytes."""
    upload = SingleRequestUpload(desk.ctx, who, round_id or desk.round.id, None, len(body))
    upload.feed(body)
    return upload


def part(desk: Desk, who: Identity, body: bytes, begin: int, end: int | None = None) -> UploadPart:
    """Return a PATCH that has received the bytes from begin to end."""
    request = UploadPart(desk.ctx, who, desk.round.id, begin, len(body), digest(body))
    if body[begin:end]:
        request.feed(body[begin:end])
    return request
