"""Byte strings stored in chunks, so that most code never holds a whole model in memory.

Each chunk is a row. Its bytes are in that row, or in an object store if one is configured: a bucket, or a folder. An
object is written before the row that refers to it and deleted after that row: a crash in between leaves an unreferenced
object, never a row without its bytes. `server.service.cleaning` removes such objects.
"""

import hashlib
import logging
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import ClassVar, cast

from sqlalchemy import ColumnElement, Table, and_, bindparam, delete, exists, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.core.errors import Gone
from server.store.database import BULK_PAUSE_S, Database, after_commit, database_of
from server.store.objects.store import ObjectStoreError, ObjectStoreFull, ObjectWriter, Piece
from server.store.ownership import claim, claim_once
from server.store.tables import BLOB_REFERENCES, Blob, BlobChunk
from shared.contract.errors import DistransError
from shared.tensors.wire import Encoded

CHUNK_BYTES = 2 * 1024 * 1024
_CHUNKS_PER_REMOVAL = 4  # per transaction, to let other writers in and keep SQLite's log small
_ID_LENGTH = 32  # of a blob; the keys of its objects start with it
# Built once: they run for every piece of an upload, and building them takes longer than running them.
_BLOBS, _CHUNKS = (cast(Table, table.__table__) for table in (Blob, BlobChunk))
_ADD_CHUNK = insert(_CHUNKS)
_EXTEND_CHUNK = (
    update(_CHUNKS)
    .where(_CHUNKS.c.blob_id == bindparam("given_blob_id"), _CHUNKS.c.object_key == bindparam("given_object_key"))
    .values(size_bytes=_CHUNKS.c.size_bytes + bindparam("given_size_bytes"))
)
_READ_CHUNK = (
    select(_CHUNKS.c.data)
    .where(_CHUNKS.c.blob_id == bindparam("given_id"), _CHUNKS.c.start == bindparam("given_start"))
    .execution_options(distrans_binary=True)
)
_RESIZE = update(_BLOBS).where(_BLOBS.c.id == bindparam("given_id")).values(size_bytes=bindparam("size_bytes"))
logger = logging.getLogger(__name__)


def begin_blob(session: Session, blob_id: str | None = None) -> str:
    """Create an empty blob and return its id."""
    blob = Blob(id=blob_id or uuid.uuid4().hex, size_bytes=0, digest=None)
    session.add(blob)
    session.flush()
    return blob.id


class Writer:
    """Writes what one request, or one thread, appends to a blob; call it outside the transactions that record it."""

    def __init__(self, db: Database, blob_id: str) -> None:
        self._db = db
        self._inner: ObjectWriter = _RowWriter() if db.objects is None else db.objects.writer(blob_id)
        self._may_discard = True  # nothing is recorded, for all we know

    @property
    def is_due(self) -> bool:
        """Whether what was written should be recorded now: else memory would fill up, or a crash would cost much."""
        return self._inner.is_due

    def write(self, data: bytes) -> None:
        """Write the next bytes. Raise StorageFull if only the reserve is left on the disk."""
        self._db.require_room()
        claim_once(self._db)
        try:
            for begin in range(0, len(data), CHUNK_BYTES):
                self._inner.write(data[begin : begin + CHUNK_BYTES])
        except ObjectStoreFull as error:
            self._db.note_full(error)
            raise

    @contextmanager
    def flushed(self) -> Iterator[list[Piece]]:
        """Yield what was written since the last call, durably if it is in objects; record it within the block."""
        try:
            pieces = self._inner.flush()
        except ObjectStoreFull as error:
            self._db.note_full(error)
            raise
        try:
            yield pieces
        except DistransError:  # raised by our own code, so the transaction was rolled back
            raise
        except BaseException:
            self._may_discard = False  # it may have been committed
            raise
        self._may_discard = self._may_discard and not pieces

    def discard(self) -> None:
        """Delete what was written unless some of it was recorded, or may have been. Failures are logged."""
        if self._db.objects is not None and self._may_discard and self._inner.keys:
            try:
                self._db.objects.delete(self._inner.keys)
            except ObjectStoreError as error:
                logger.warning("objects of a rejected upload will be collected later: %s", error)


class _RowWriter:
    """Keeps bytes in memory until they are recorded in rows."""

    keys: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    @property
    def is_due(self) -> bool:
        return bool(self._pieces)

    def write(self, data: bytes) -> None:
        self._pieces.append(Piece(len(data), data))

    def flush(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def append(session: Session, blob_id: str, begin: int, pieces: list[Piece]) -> int:
    """Append to an unsealed blob of `begin` bytes, locked by the caller; return its new size."""
    for piece in pieces:
        row = {"blob_id": blob_id, "size_bytes": piece.size_bytes, "object_key": piece.object_key}
        if piece.extends:
            session.execute(_EXTEND_CHUNK, {f"given_{name}": value for name, value in row.items()})
        else:
            session.execute(_ADD_CHUNK, row | {"start": begin, "data": piece.data})
        begin += piece.size_bytes
    if pieces:
        session.execute(_RESIZE, {"given_id": blob_id, "size_bytes": begin})
    return begin


def seal(session: Session, blob_id: str, digest: str) -> Blob:
    """Mark the blob as complete with this digest."""
    blob = session.get_one(Blob, blob_id)
    blob.digest = digest
    return blob


def is_unreferenced() -> ColumnElement[bool]:
    """Return the SQL condition that nothing refers to a blob."""
    return and_(*[~exists().where(column == Blob.id) for column in BLOB_REFERENCES])


def remove_in(session: Session, blob_id: str) -> None:
    """Remove an unreferenced blob in the caller's transaction; the rest of a large one follows after the commit.

    If that part fails, the cleaner collects it.
    """
    is_gone, keys = _remove_some(session, blob_id)

    def finish(db: Database) -> None:
        try:
            _delete_objects(db, keys)
        except ObjectStoreError as error:
            logger.warning("objects of blob %s were not removed and will be collected later: %s", blob_id, error)
        if not is_gone:
            try_remove(db, blob_id)

    after_commit(session, finish)


def remove(db: Database, blob_id: str) -> None:
    """Remove an unreferenced blob, a few chunks per transaction."""
    is_gone = False
    while not is_gone:
        with db.write(durable=False) as session:  # what a power cut brings back is found again
            is_gone, keys = _remove_some(session, blob_id)
        _delete_objects(db, keys)
        if not is_gone:
            time.sleep(BULK_PAUSE_S)


def _remove_some(session: Session, blob_id: str) -> tuple[bool, list[str]]:
    """Remove the first chunks, and the blob with the last ones; return (whether it is gone, keys of their objects)."""
    session.flush()
    session.get(Blob, blob_id, with_for_update=True)  # waits for a transaction about to refer to it
    unused = session.execute(select(Blob.id).where(Blob.id == blob_id, is_unreferenced())).first()
    if unused is None:  # already gone, or still in use: such a blob is never touched
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
    if db.objects is not None and keys:
        db.sync()  # that nothing refers to them
        db.objects.delete(keys)


def store(db: Database, content: Encoded | bytes) -> str:
    """Write and seal a blob, one short transaction per chunk; return its id. Nothing refers to it yet.

    Leave nothing behind on failure. Raise StorageFull before the first byte if there is no room.
    """
    blob_id = uuid.uuid4().hex
    total = len(content) if isinstance(content, bytes) else content.size_bytes
    db.require_room(total)
    writer, size, written, hasher = Writer(db, blob_id), 0, 0, hashlib.sha256()
    try:
        with db.write(durable=False) as session:  # the transaction that refers to it makes it durable
            begin_blob(session, blob_id)
        for chunk in _chunks_of(content):
            hasher.update(chunk)
            writer.write(chunk)
            written += len(chunk)
            if not writer.is_due and written < total:
                continue
            with writer.flushed() as pieces, db.write(durable=False) as session:
                size = append(session, blob_id, size, pieces)
                if written == total:
                    seal(session, blob_id, hasher.hexdigest())
    except Exception:
        try_remove(db, blob_id)
        writer.discard()
        raise
    return blob_id


def _chunks_of(content: Encoded | bytes) -> Iterator[bytes]:
    """Yield the content in full chunks; only the last one may be shorter, and only that of no content is empty."""
    if isinstance(content, bytes):
        for begin in range(0, max(len(content), 1), CHUNK_BYTES):
            yield content[begin : begin + CHUNK_BYTES]
        return
    chunk = bytearray()
    for piece in content.pieces(CHUNK_BYTES):
        room = CHUNK_BYTES - len(chunk)
        chunk += piece[:room]
        if len(chunk) == CHUNK_BYTES:
            yield bytes(chunk)
            chunk = bytearray(piece[room:])
    if chunk:
        yield bytes(chunk)


def try_remove(db: Database, *blob_ids: str | None) -> None:
    """Remove blobs that turned out not to be needed. Failures are logged; the cleaner collects the rest."""
    for blob_id in filter(None, blob_ids):
        try:
            remove(db, blob_id)
        except (SQLAlchemyError, ObjectStoreError) as error:
            logger.warning(
                "blob %s was not removed and will be collected later: %s", blob_id, getattr(error, "orig", error)
            )


def read(db: Database, blob_id: str, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes from `begin` to `end`, one chunk at a time. Raise Gone up front if any are missing."""
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
            for position in range(first, last, CHUNK_BYTES):
                yield _from_object(db, key, position, min(position + CHUNK_BYTES, last))
            continue
        with db.read() as session:
            data = session.execute(_READ_CHUNK, {"given_id": blob_id, "given_start": start}).scalar_one_or_none()
        if data is None:
            raise _dropped()
        yield data[first:last]


def _from_object(db: Database, key: str, begin: int, end: int) -> bytes:
    if db.objects is None or not db.objects.holds(key):
        here = "DISTRANS_BLOBS is not set" if db.objects is None else f"DISTRANS_BLOBS is {db.objects.address}"
        raise ObjectStoreError(
            f"Tensors of this coordinator are in another place: {here}.",
            next_step="Set DISTRANS_BLOBS to the address they were written to.",
        )
    return db.objects.get(key, begin, end)


def _dropped() -> Gone:
    return Gone("tensors-dropped", "These tensors have been deleted.")


def read_head(session: Session, blob_id: str, size_bytes: int) -> bytes:
    """Return the first bytes of a blob in the caller's transaction, or all of a shorter one. Raise Gone without any."""
    db, head = database_of(session), b""
    chunks = select(BlobChunk.start, BlobChunk.size_bytes, BlobChunk.object_key).where(
        BlobChunk.blob_id == blob_id, BlobChunk.start < size_bytes
    )
    for start, size, key in session.execute(chunks.order_by(BlobChunk.start)).all():
        if key is not None:
            head += _from_object(db, key, 0, min(size, size_bytes - start))
        else:
            data = session.execute(_READ_CHUNK, {"given_id": blob_id, "given_start": start}).scalar_one()
            head += data[: size_bytes - start]
    if not head:
        raise _dropped()
    return head


def read_all(db: Database, blob_id: str) -> bytes:
    """Return a whole blob. Hold only one at a time."""
    return b"".join(read(db, blob_id))


def unreferenced_objects(db: Database) -> set[str]:
    """Return the keys of objects that no chunk refers to, including ones about to be referred to."""
    found: set[str] = set()
    for keys in db.objects.list_keys() if db.objects is not None else ():
        blob_ids = {key[:_ID_LENGTH] for key in keys}
        with db.read() as session:
            chunks = select(BlobChunk.object_key).where(BlobChunk.blob_id.in_(blob_ids))
            found |= set(keys) - set(session.execute(chunks).scalars())
    return found


def delete_objects(db: Database, keys: Collection[str]) -> None:
    """Delete unreferenced objects.

    Raise if the prefix belongs to another coordinator, whose objects would all look like garbage.
    """
    if db.objects is not None and keys:
        claim(db)
        db.objects.delete(sorted(keys))
