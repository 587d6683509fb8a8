"""Coordinator uptime, which deadlines and leases are measured in.

Every process adds the time counted by its own monotonic clock to one number in the database. The larger number wins, so
replicas do not count the same second twice. Clock jumps, replicas with different clocks, and a night of
downtime therefore take no time away from any site, and stall nothing.
"""

import math

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.core.lifecycle import UNDER_WAY
from server.service.context import Context
from server.store.database import LOCK
from server.store.tables import CoordinatorClock, Federation, Round

_ROW_ID = 1
LONGEST_STEP_S = 60.0  # a process cut off from its database for longer did not serve the sites either


def uptime(session: Session) -> float:
    """Return the coordinator's uptime in seconds, as of the last count."""
    return session.execute(select(CoordinatorClock.uptime)).scalar_one()


def wall_time(session: Session, ctx: Context, at_uptime: float) -> float:
    """Return the wall-clock time, in whole seconds, at which this uptime will be reached if nothing stops."""
    row, now = session.get_one(CoordinatorClock, _ROW_ID), ctx.clock()
    is_current = abs(now - row.counted_at) <= LONGEST_STEP_S  # else it was down, or the clock was changed
    return math.floor((row.counted_at if is_current else now) + (at_uptime - row.uptime))


class UptimeCounter:
    """Counts uptime on behalf of one process."""

    def __init__(self, ctx: Context, longest_step_s: float = LONGEST_STEP_S) -> None:
        self._ctx, self._longest_step_s = ctx, longest_step_s
        self._last: tuple[float, float] | None = None  # (monotonic clock of this process, uptime then)

    def count(self) -> None:
        """Add the time since the last call. Write nothing while nothing is timed."""
        now = self._ctx.monotonic()
        if not self._is_needed():
            self._last = None
            return
        with self._ctx.db.write() as session:
            row = session.get_one(CoordinatorClock, _ROW_ID, with_for_update=LOCK)
            if self._last is not None:
                passed_s = min(now - self._last[0], self._longest_step_s)
                row.uptime = max(row.uptime, self._last[1] + passed_s)
            row.counted_at = self._ctx.clock()
            counted = row.uptime
        self._last = now, counted

    def _is_needed(self) -> bool:
        running = select(Federation.id).where(Federation.state == "running").limit(1)
        under_way = select(Round.id).where(Round.state.in_(UNDER_WAY)).limit(1)
        with self._ctx.db.read() as session:
            return any(session.execute(query).first() is not None for query in (running, under_way))
