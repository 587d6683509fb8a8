"""Models that many agents download at the same time, each read once from where it is stored."""

import asyncio
from collections import OrderedDict

from fastapi.concurrency import run_in_threadpool

from server.store import blobs
from server.store.database import Database

MAX_BYTES = 128 * 1024 * 1024  # of all models together; a larger model is read anew for each download


class HotModels:
    """Blobs by id, the least recently used of which are forgotten. For use in the event loop only."""

    def __init__(self, db: Database, max_bytes: int = MAX_BYTES) -> None:
        self._db, self._max_bytes = db, max_bytes
        self._reads: OrderedDict[str, tuple[int, asyncio.Task[bytes]]] = OrderedDict()

    async def get(self, blob_id: str, size_bytes: int) -> bytes | None:
        """Return all bytes of a blob; None if it is too large to be kept. Concurrent callers share one read."""
        if size_bytes > self._max_bytes:
            return None
        if blob_id not in self._reads:
            self._make_room(size_bytes)
            read = asyncio.create_task(run_in_threadpool(blobs.read_all, self._db, blob_id))
            self._reads[blob_id] = size_bytes, read
        self._reads.move_to_end(blob_id)
        read = self._reads[blob_id][1]
        try:
            return await asyncio.shield(read)  # a caller that hangs up must not end the read of others
        except Exception:
            if blob_id in self._reads and self._reads[blob_id][1] is read:
                del self._reads[blob_id]
            raise

    def _make_room(self, size_bytes: int) -> None:
        while self._reads and sum(size for size, _ in self._reads.values()) + size_bytes > self._max_bytes:
            self._reads.popitem(last=False)
