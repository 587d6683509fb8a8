"""Wakes long polls when their federation changes.

Waiters are futures in the event loop; one thread watches the database for all of them. A change committed by this
process wakes that thread at once, on PostgreSQL also one by any other process. Besides, the thread looks at intervals
whether anything was committed: one small query, however many federations there are. After a commit, it reads the
versions of the federations that have waiters.
"""

import asyncio
import logging
import threading

from server.service.queries import federation_versions
from server.store.changes import ChangeListener
from server.store.commit_detector import CommitDetector
from server.store.database import Database

logger = logging.getLogger(__name__)
_DELETED = -1  # stands for the version of a deleted federation
_LISTENING_FACTOR = 4  # intervals between two looks while others announce their changes: those of older releases do not


class ChangeNotifier:
    """Wakes all waiters of a federation when its version in the database grows, on any replica."""

    def __init__(self, db: Database, poll_interval_s: float) -> None:
        self._db, self._interval_s = db, poll_interval_s
        self._versions: dict[int, int] = {}
        self._waiters: dict[int, set[asyncio.Future[None]]] = {}  # only changed in the event loop; no set is empty
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = None if db.is_sqlite else ChangeListener(db)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="changes", daemon=True)
        self.closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start watching the database."""
        self._loop = loop
        if self._listener is not None:
            self._listener.start()
        self._thread.start()

    def waiter(self, federation_id: int) -> asyncio.Future[None]:
        """Return a future that is done after the next change. Get it before you read, or you may miss one."""
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
        """Wake all waiters, because the process is about to stop. Call it in the event loop. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for federation_id in list(self._waiters):
            self._notify(federation_id)

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._db.change_committed.set()
        if self._thread.is_alive():
            self._thread.join()
            if self._listener is not None:
                self._listener.stop()

    def _watch(self) -> None:
        changes, seen = None, None
        while not self._stopping.is_set():
            is_told = self._listener is not None and self._listener.is_listening
            self._db.change_committed.wait(self._interval_s * (_LISTENING_FACTOR if is_told else 1))
            self._db.change_committed.clear()  # before reading, so that no change is missed
            if not self._waiters or self._stopping.is_set():
                continue
            try:
                changes = changes or CommitDetector(self._db)
                marker = changes.marker()
                if marker != seen:
                    self._wake_changed(list(self._waiters))
                    seen = marker  # only now, so that a failed read is repeated
            except Exception:  # the database may come back
                logger.exception("watching for changes failed; trying again")
        if changes is not None:
            changes.close()

    def _wake_changed(self, federation_ids: list[int]) -> None:
        """Wake all waiters of federations whose version differs from the last one seen."""
        versions = federation_versions(self._db, federation_ids)
        for federation_id in {*versions, *federation_ids}:
            version = versions.get(federation_id, _DELETED)
            if self._versions.get(federation_id) != version or version == _DELETED:
                self._versions[federation_id] = version
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._notify, federation_id)

    def _notify(self, federation_id: int) -> None:
        for future in list(self._waiters.get(federation_id, ())):
            if not future.done():
                future.set_result(None)
