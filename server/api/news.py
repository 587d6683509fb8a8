"""Long polls without threads: waiters are futures in the event loop; one thread watches the database for all."""

import asyncio
import logging
import threading
from collections import defaultdict

from sqlalchemy import select

from server.store.session import Database
from server.store.tables import Federation

logger = logging.getLogger(__name__)


class News:
    """Tells waiters of a federation when its version in the database has grown, whichever replica raised it."""

    def __init__(self, db: Database, poll_interval_s: float) -> None:
        self._db, self._interval_s = db, poll_interval_s
        self._versions: dict[int, int] = {}
        self._waiters: defaultdict[int, set[asyncio.Future[None]]] = defaultdict(set)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="news", daemon=True)
        self._waiting = 0  # changed in the event loop only; the watching thread just reads it
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
        waiters = self._waiters[federation_id]
        waiters.add(future)
        self._waiting += 1
        future.add_done_callback(lambda done: self._forget(waiters, done))
        return future

    def _forget(self, waiters: set[asyncio.Future[None]], future: asyncio.Future[None]) -> None:
        waiters.discard(future)
        self._waiting -= 1

    def close(self) -> None:
        """Answer everybody who waits; called in the event loop when the process is about to stop."""
        self.closed = True
        for waiters in self._waiters.values():
            self._release(waiters)

    def stop(self) -> None:
        """End the watching thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval_s):
            if not self._waiting:
                continue
            try:
                with self._db.read() as session:
                    rows = session.execute(select(Federation.id, Federation.version)).all()
            except Exception:  # the database may come back
                logger.exception("watching for news failed; trying again")
                continue
            for federation_id, version in rows:
                if self._versions.get(federation_id) != version:
                    self._versions[federation_id] = version
                    if self._loop is not None:
                        self._loop.call_soon_threadsafe(self._notify, federation_id)

    def _notify(self, federation_id: int) -> None:
        self._release(self._waiters[federation_id])

    @staticmethod
    def _release(waiters: set[asyncio.Future[None]]) -> None:
        for future in list(waiters):
            if not future.done():
                future.set_result(None)
