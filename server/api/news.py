"""Long polls without threads: waiters are futures in the event loop; one thread watches the database for all.

While nothing is committed, watching costs one small query per interval, whatever the number of federations. After a
commit the versions of those federations are read that somebody waits for.
"""

import asyncio
import logging
import threading

from sqlalchemy import select

from server.store.changes import Changes
from server.store.session import Database
from server.store.tables import Federation

logger = logging.getLogger(__name__)
_NAMED = 500  # federations that a query names; beyond that reading all versions is quicker
_GONE = -1  # the version of a federation that was deleted


class News:
    """Tells waiters of a federation when its version in the database has grown, whichever replica raised it."""

    def __init__(self, db: Database, poll_interval_s: float) -> None:
        self._db, self._interval_s = db, poll_interval_s
        self._versions: dict[int, int] = {}
        self._waiters: dict[int, set[asyncio.Future[None]]] = {}  # changed in the event loop only; no set is empty
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="news", daemon=True)
        self.closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch."""
        self._loop = loop
        self._thread.start()

    def waiter(self, federation_id: int) -> asyncio.Future[None]:
        """A future that is done after the next change; take it before you look, so that nothing is missed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_result(None)
            return future
        self._waiters.setdefault(federation_id, set()).add(future)
        future.add_done_callback(lambda done: self._forget(federation_id, done))
        return future

    def _forget(self, federation_id: int, future: asyncio.Future[None]) -> None:
        waiters = self._waiters[federation_id]
        waiters.discard(future)
        if not waiters:
            del self._waiters[federation_id]

    def close(self) -> None:
        """Answer everybody who waits; called in the event loop when the process is about to stop. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for federation_id in list(self._waiters):
            self._notify(federation_id)

    def stop(self) -> None:
        """End the watching thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        changes, seen = None, None
        while not self._stopping.wait(self._interval_s):
            if not self._waiters:
                continue
            try:
                changes = changes or Changes(self._db)
                marker = changes.marker()
                if marker != seen:
                    self._look(list(self._waiters))
                    seen = marker  # only now: a look that failed is repeated
            except Exception:  # the database may come back
                logger.exception("watching for news failed; trying again")
        if changes is not None:
            changes.close()

    def _look(self, federation_ids: list[int]) -> None:
        """Wake those who wait for a federation whose version differs from the last one that was seen."""
        query = select(Federation.id, Federation.version)
        if len(federation_ids) <= _NAMED:
            query = query.where(Federation.id.in_(federation_ids))
        with self._db.read() as session:
            versions = {row.id: row.version for row in session.execute(query)}
        for federation_id in {*versions, *federation_ids}:
            version = versions.get(federation_id, _GONE)
            if self._versions.get(federation_id) != version or version == _GONE:
                self._versions[federation_id] = version
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._notify, federation_id)

    def _notify(self, federation_id: int) -> None:
        for future in list(self._waiters.get(federation_id, ())):
            if not future.done():
                future.set_result(None)
