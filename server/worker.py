"""The background threads of a coordinator process: one per job, so that none waits for another or fails with it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from server.service.aggregation import Aggregator
from server.service.cleaning import Cleaner, Retention
from server.service.context import Context
from server.service.housekeeping import Heartbeats, pass_deadlines
from server.service.isolation import Isolation
from server.service.uptime import UptimeCounter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Something to do again and again; when it returns True there is more to do at once."""

    name: str
    every_s: float
    run: Callable[[], object]
    wake: threading.Event | None = None  # do not wait for the time to come when this is set


class Worker:
    """Runs until `stop`; every process has one, leases in the database keep them apart."""

    def __init__(self, ctx: Context, heartbeats: Heartbeats, retention: Retention) -> None:
        self._ctx, self._heartbeats = ctx, heartbeats
        self._stopping = threading.Event()
        aggregator, uptime = Aggregator(ctx), UptimeCounter(ctx)
        cleaner = Cleaner(ctx, retention, self._stopping)
        deadlines_apart, heartbeats_apart = Isolation(ctx), Isolation(ctx)
        jobs = (
            Job("aggregation", 0.5, aggregator.step, ctx.db.work),
            Job("uptime", 2, uptime.count),
            Job("deadlines", 0.5, lambda: pass_deadlines(ctx, deadlines_apart)),
            Job("heartbeats", 2, lambda: heartbeats.flush(ctx, heartbeats_apart)),
            Job("cleaning", 30, cleaner.clean),
            Job("objects", 3600, cleaner.collect_objects),
        )
        self._threads = [threading.Thread(target=self._repeat, args=(job,), name=job.name, daemon=True) for job in jobs]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the steps under way and end."""
        self._stopping.set()
        self._ctx.db.work.set()
        for thread in self._threads:
            thread.join()
        self._heartbeats.flush(self._ctx)

    def _repeat(self, job: Job) -> None:
        while not self._stopping.is_set():
            more: object = False
            try:
                more = job.run()
            except Exception:  # the thread must outlive a database that is away for a while
                logger.exception("%s failed; trying again", job.name)
            if more is True:
                continue
            if job.wake is None:
                self._stopping.wait(job.every_s)
            else:
                job.wake.wait(job.every_s)
                job.wake.clear()
