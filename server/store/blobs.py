"""Bytes in SQL, in chunks: written and read piece by piece, so that few have to hold a whole model."""

import hashlib
import uuid
from collections.abc import Iterator

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from server.core.errors import Gone
from server.store.session import LOCK, Database
from server.store.tables import Blob, BlobChunk

CHUNK_BYTES = 2 * 1024 * 1024


def begin_blob(session: Session, now: float) -> str:
    """A new, empty blob."""
    blob = Blob(id=uuid.uuid4().hex, size_bytes=0, digest=None, created_at=now)
    session.add(blob)
    session.flush()
    return blob.id


def append(session: Session, blob_id: str, data: bytes) -> int:
    """Add bytes at the end of a blob that is being written; its new size."""
    blob = session.get_one(Blob, blob_id, with_for_update=LOCK)
    for begin in range(0, len(data), CHUNK_BYTES):
        piece = data[begin : begin + CHUNK_BYTES]
        session.add(BlobChunk(blob_id=blob_id, start=blob.size_bytes, size_bytes=len(piece), data=piece))
        blob.size_bytes += len(piece)
    return blob.size_bytes


def seal(session: Session, blob_id: str, digest: str) -> Blob:
    """The blob is whole and has this digest."""
    blob = session.get_one(Blob, blob_id)
    blob.digest = digest
    return blob


def drop(session: Session, blob_id: str) -> None:
    """Remove a blob that nothing refers to any more."""
    session.execute(delete(BlobChunk).where(BlobChunk.blob_id == blob_id))
    session.execute(delete(Blob).where(Blob.id == blob_id))


def store(db: Database, data: bytes, now: float) -> str:
    """Write a whole blob in short transactions and seal it; nothing refers to it yet."""
    with db.write() as session:
        blob_id = begin_blob(session, now)
    for begin in range(0, len(data), CHUNK_BYTES):
        with db.write() as session:
            append(session, blob_id, data[begin : begin + CHUNK_BYTES])
    with db.write() as session:
        seal(session, blob_id, hashlib.sha256(data).hexdigest())
    return blob_id


def read(db: Database, blob_id: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The bytes from `begin` up to `end`, one chunk in memory at a time; Gone, at once, when some are not there."""
    wanted = select(BlobChunk.start, BlobChunk.size_bytes).where(
        BlobChunk.blob_id == blob_id, BlobChunk.start + BlobChunk.size_bytes > begin
    )
    if end is not None:
        wanted = wanted.where(BlobChunk.start < end)
    with db.read() as session:
        blob = session.get(Blob, blob_id)
        chunks = [(start, size) for start, size in session.execute(wanted.order_by(BlobChunk.start))]
    known = begin
    for start, size in chunks:
        known = start + size if start <= known else known
    if blob is None or known < (blob.size_bytes if end is None else min(end, blob.size_bytes)):
        raise _dropped()
    return _pieces(db, blob_id, chunks, begin, end)


def _pieces(db: Database, blob_id: str, chunks: list[tuple[int, int]], begin: int, end: int | None) -> Iterator[bytes]:
    for start, size in chunks:
        with db.read() as session:
            query = select(BlobChunk.data).where(BlobChunk.blob_id == blob_id, BlobChunk.start == start)
            data = session.execute(query).scalar_one_or_none()
        if data is None:
            raise _dropped()
        yield data[max(begin - start, 0) : size if end is None else min(end - start, size)]


def _dropped() -> Gone:
    return Gone("tensors-dropped", "These tensors are no longer kept.")


def read_all(db: Database, blob_id: str) -> bytes:
    """A whole blob in memory; for one at a time."""
    return b"".join(read(db, blob_id))
