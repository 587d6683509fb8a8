"""The background thread of a coordinator process: folds updates, finishes rounds, passes deadlines, cleans up."""

import logging
import threading
import time

from server.service.aggregation import Aggregator
from server.service.context import Context
from server.service.housekeeping import Heartbeats, Retention, clean, collect_objects, pass_deadlines

logger = logging.getLogger(__name__)
_TICK_S = 0.5
_HEARTBEAT_S = 2.0
_CLEAN_S = 30.0
_COLLECT_OBJECTS_S = 3600.0  # all objects are listed for it


class Worker:
    """Runs until `stop`; every process has one, leases in the database keep them apart."""

    def __init__(self, ctx: Context, heartbeats: Heartbeats, retention: Retention) -> None:
        self._ctx, self._heartbeats, self._retention = ctx, heartbeats, retention
        self._aggregator = Aggregator(ctx)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._due: dict[str, float] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the step under way and end."""
        self._stopping.set()
        self._ctx.db.work.set()
        self._thread.join()
        self._heartbeats.flush(self._ctx)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                pass_deadlines(self._ctx)
                if self._aggregator.step():
                    continue  # there may be more
                if self._is_time("heartbeats", _HEARTBEAT_S):
                    self._heartbeats.flush(self._ctx)
                if self._is_time("clean", _CLEAN_S):
                    clean(self._ctx, self._retention)
                if self._is_time("objects", _COLLECT_OBJECTS_S):
                    collect_objects(self._ctx, self._retention)
            except Exception:  # the thread must outlive a database that is away for a while
                logger.exception("the background worker failed; trying again")
            self._ctx.db.work.wait(_TICK_S)
            self._ctx.db.work.clear()

    def _is_time(self, job: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(job, 0.0):
            return False
        self._due[job] = now + every_s
        return True
