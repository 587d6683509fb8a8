"""Bytes in chunks, written and read piece by piece, so that few have to hold a whole model.

The chunks are rows; their bytes are in the rows too, or in an object store when one is configured. An object is written
before the row that refers to it and removed after that row is gone: a crash in between leaves an object that nothing
refers to, never a row without its bytes. `server.service.cleaning` removes such objects.
"""

import hashlib
import logging
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, exists, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.core.errors import Gone
from server.store.objects import ObjectStoreError, ObjectStoreFull
from server.store.ownership import claim, claim_once
from server.store.session import LOCK, Database, after_commit
from server.store.tables import BLOB_REFERENCES, Blob, BlobChunk

CHUNK_BYTES = 2 * 1024 * 1024
_CHUNKS_PER_REMOVAL = 4  # in one transaction: others can write in between, and SQLite's log stays small
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Bytes that are ready to be referred to: in an object, or in memory."""

    size_bytes: int
    data: bytes
    object_key: str | None


def begin_blob(session: Session, blob_id: str | None = None) -> str:
    """A new, empty blob."""
    blob = Blob(id=blob_id or uuid.uuid4().hex, size_bytes=0, digest=None)
    session.add(blob)
    session.flush()
    return blob.id


def stage(db: Database, blob_id: str, data: bytes) -> list[Piece]:
    """Bring bytes of an upload to where they are kept; call it outside of the transaction that appends them.

    Refused with StorageFull while the database's disk has no more than its reserve.
    """
    if db.objects is None:
        db.require_room()
    return _stage(db, blob_id, data)


def _stage(db: Database, blob_id: str, data: bytes) -> list[Piece]:
    parts = [data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES)]
    if db.objects is None:
        return [Piece(len(part), part, None) for part in parts]
    claim_once(db)
    try:
        return [Piece(len(part), b"", db.objects.put(blob_id, part)) for part in parts]
    except ObjectStoreFull as error:
        db.note_full(error)
        raise


def append(session: Session, blob_id: str, pieces: list[Piece]) -> int:
    """Add bytes at the end of a blob that is being written; its new size."""
    blob = session.get_one(Blob, blob_id, with_for_update=LOCK)
    for piece in pieces:
        session.add(
            BlobChunk(
                blob_id=blob_id,
                start=blob.size_bytes,
                size_bytes=piece.size_bytes,
                data=piece.data,
                object_key=piece.object_key,
            )
        )
        blob.size_bytes += piece.size_bytes
    return blob.size_bytes


def seal(session: Session, blob_id: str, digest: str) -> Blob:
    """The blob is whole and has this digest."""
    blob = session.get_one(Blob, blob_id)
    blob.digest = digest
    return blob


def is_unreferenced() -> ColumnElement[bool]:
    """The condition that nothing refers to a blob."""
    return and_(*[~exists().where(column == Blob.id) for column in BLOB_REFERENCES])


def drop(session: Session, blob_id: str) -> None:
    """Remove a blob that nothing refers to any more; what is left of a large one goes after the commit.

    If that fails, it will be collected.
    """
    is_gone, keys = _remove_some(session, blob_id)

    def finish(db: Database) -> None:
        try:
            _delete_objects(db, keys)
        except ObjectStoreError as error:
            logger.warning("objects of blob %s were not removed, they will be collected: %s", blob_id, error)
        if not is_gone:
            discard(db, blob_id)

    after_commit(session, finish)


def remove(db: Database, blob_id: str) -> None:
    """Remove a blob that nothing refers to, a few chunks per transaction."""
    is_gone = False
    while not is_gone:
        with db.write() as session:
            is_gone, keys = _remove_some(session, blob_id)
        _delete_objects(db, keys)


def _remove_some(session: Session, blob_id: str) -> tuple[bool, list[str]]:
    """Remove the first chunks and, with the last ones, the blob; (whether it is gone, keys of the chunks' objects)."""
    session.flush()
    session.get(Blob, blob_id, with_for_update=True)  # waits for whoever is about to refer to it
    unused = session.execute(select(Blob.id).where(Blob.id == blob_id, is_unreferenced())).first()
    if unused is None:  # gone already; or dropped by mistake, and a blob in use is never touched
        return True, []
    chunks = select(BlobChunk.start, BlobChunk.object_key).where(BlobChunk.blob_id == blob_id)
    rows = session.execute(chunks.order_by(BlobChunk.start).limit(_CHUNKS_PER_REMOVAL)).all()
    if rows:
        session.execute(delete(BlobChunk).where(BlobChunk.blob_id == blob_id, BlobChunk.start <= rows[-1].start))
    is_last = len(rows) < _CHUNKS_PER_REMOVAL
    if is_last:
        session.execute(delete(Blob).where(Blob.id == blob_id))
    return is_last, [row.object_key for row in rows if row.object_key is not None]


def _delete_objects(db: Database, keys: list[str]) -> None:
    if db.objects is not None:
        db.objects.delete(keys)


def store(db: Database, data: bytes) -> str:
    """Write a whole blob in short transactions, one per chunk, and seal it; nothing refers to it yet.

    Leaves nothing behind when it fails; StorageFull, before a byte is written, when there is no room.
    """
    blob_id = uuid.uuid4().hex
    if db.objects is None:
        db.require_room(len(data))
    try:
        for begin in range(0, max(len(data), 1), CHUNK_BYTES):
            pieces = _stage(db, blob_id, data[begin : begin + CHUNK_BYTES])
            with db.write() as session:
                if begin == 0:
                    begin_blob(session, blob_id)
                append(session, blob_id, pieces)
                if begin + CHUNK_BYTES >= len(data):
                    seal(session, blob_id, hashlib.sha256(data).hexdigest())
    except Exception:
        discard(db, blob_id)
        raise
    return blob_id


def discard(db: Database, *blob_ids: str | None) -> None:
    """Remove blobs that were written in vain; what cannot be removed now will be collected."""
    for blob_id in filter(None, blob_ids):
        try:
            remove(db, blob_id)
        except (SQLAlchemyError, ObjectStoreError) as error:
            logger.warning("blob %s was not removed, it will be collected: %s", blob_id, getattr(error, "orig", error))


def read(db: Database, blob_id: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The bytes from `begin` up to `end`, one chunk in memory at a time; Gone, at once, when some are not there."""
    wanted = select(BlobChunk.start, BlobChunk.size_bytes, BlobChunk.object_key).where(
        BlobChunk.blob_id == blob_id, BlobChunk.start + BlobChunk.size_bytes > begin
    )
    if end is not None:
        wanted = wanted.where(BlobChunk.start < end)
    with db.read() as session:
        blob = session.get(Blob, blob_id)
        chunks = [(start, size, key) for start, size, key in session.execute(wanted.order_by(BlobChunk.start))]
    known = begin
    for start, size, _ in chunks:
        known = start + size if start <= known else known
    if blob is None or known < (blob.size_bytes if end is None else min(end, blob.size_bytes)):
        raise _dropped()
    return _pieces(db, blob_id, chunks, begin, end)


def _pieces(
    db: Database, blob_id: str, chunks: list[tuple[int, int, str | None]], begin: int, end: int | None
) -> Iterator[bytes]:
    for start, size, key in chunks:
        first, last = max(begin - start, 0), size if end is None else min(end - start, size)
        if key is not None:
            yield _from_object(db, key, first, last)
            continue
        with db.read() as session:
            query = select(BlobChunk.data).where(BlobChunk.blob_id == blob_id, BlobChunk.start == start)
            data = session.execute(query).scalar_one_or_none()
        if data is None:
            raise _dropped()
        yield data[first:last]


def _from_object(db: Database, key: str, begin: int, end: int) -> bytes:
    if db.objects is None:
        raise ObjectStoreError(
            "Tensors of this coordinator are in an object store that it was not told of.",
            next_step="Set DISTRANS_BLOBS to the address that they were written to.",
        )
    return db.objects.get(key, begin, end)


def _dropped() -> Gone:
    return Gone("tensors-dropped", "These tensors are no longer kept.")


def read_all(db: Database, blob_id: str) -> bytes:
    """A whole blob in memory; for one at a time."""
    return b"".join(read(db, blob_id))


def unreferenced_objects(db: Database) -> set[str]:
    """The keys of the objects that no chunk refers to, among them those that are about to be referred to."""
    found: set[str] = set()
    for keys in db.objects.list_keys() if db.objects is not None else ():
        blob_ids = {key.partition("/")[0] for key in keys}
        with db.read() as session:
            chunks = select(BlobChunk.object_key).where(BlobChunk.blob_id.in_(blob_ids))
            found |= set(keys) - set(session.execute(chunks).scalars())
    return found


def delete_objects(db: Database, keys: Collection[str]) -> None:
    """Remove objects that nothing refers to.

    Refused when the prefix belongs to another coordinator, whose objects would all look like garbage.
    """
    if db.objects is not None and keys:
        claim(db)
        db.objects.delete(sorted(keys))
