"""The background threads of a coordinator process: one per job, so that no job delays or breaks another."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from server.service.aggregation import Aggregator
from server.service.cleaning import Cleaner
from server.service.context import Context
from server.service.deadlines import enforce_deadlines
from server.service.heartbeats import Heartbeats
from server.service.isolation import FailureIsolation
from server.service.retention import Retention
from server.service.uptime import UptimeCounter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A function to call repeatedly; if it returns True, it is called again at once."""

    name: str
    every_s: float
    run: Callable[[], object]
    wake: threading.Event | None = None  # set to run the job now


class BackgroundJobs:
    """The jobs of one process. Replicas run the same ones; leases and row locks in the database keep them apart."""

    def __init__(self, ctx: Context, heartbeats: Heartbeats, retention: Retention) -> None:
        self._ctx, self._heartbeats = ctx, heartbeats
        self._stopping = threading.Event()
        aggregator, uptime = Aggregator(ctx), UptimeCounter(ctx)
        cleaner = Cleaner(ctx, retention, self._stopping)
        deadline_isolation, heartbeat_isolation = FailureIsolation(ctx), FailureIsolation(ctx)
        jobs = (
            Job("aggregation", 0.5, aggregator.step, ctx.db.work_available),
            Job("uptime", 2, uptime.count),
            Job("deadlines", 0.5, lambda: enforce_deadlines(ctx, deadline_isolation)),
            Job("heartbeats", 2, lambda: heartbeats.flush(ctx, heartbeat_isolation)),
            Job("cleaning", 30, cleaner.clean, ctx.db.removal_due),
            Job("objects", 3600, cleaner.collect_objects),
        )
        self._threads = [threading.Thread(target=self._repeat, args=(job,), name=job.name, daemon=True) for job in jobs]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the current steps finish, then end the threads."""
        self._stopping.set()
        self._ctx.db.work_available.set()
        self._ctx.db.removal_due.set()
        for thread in self._threads:
            thread.join()
        self._heartbeats.flush(self._ctx)

    def _repeat(self, job: Job) -> None:
        while not self._stopping.is_set():
            more: object = False
            try:
                more = job.run()
            except Exception:  # the thread must survive a database outage
                logger.exception("background job %s failed; trying again", job.name)
            if more is True:
                continue
            if job.wake is None:
                self._stopping.wait(job.every_s)
            else:
                job.wake.wait(job.every_s)
                job.wake.clear()
