"""The time that deadlines and leases are judged by: how long the coordinator has been up.

Every process adds to one number in the database what its own monotonic clock has counted since it last looked. The
larger number wins, so replicas do not count the same second twice. A wall clock that jumps, replicas whose clocks
disagree and a coordinator that was down for a night therefore cost no site any of its time, and stall nothing either.
"""

import math

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.service.context import Context
from server.store.session import LOCK
from server.store.tables import CoordinatorClock, Federation, Round

_THE_ROW = 1
LONGEST_STEP_S = 60.0  # a process that could not reach its database for longer was of no use to the sites either


def uptime(session: Session) -> float:
    """Return the seconds that the coordinator has been up, as of the last count."""
    return session.execute(select(CoordinatorClock.uptime)).scalar_one()


def wall_time(session: Session, ctx: Context, at_uptime: float) -> float:
    """When the coordinator will have been up that long if it stays up: whole seconds, for people to read."""
    row, now = session.get_one(CoordinatorClock, _THE_ROW), ctx.clock()
    is_current = abs(now - row.counted_at) <= LONGEST_STEP_S  # else it is down, or the clock was set
    return math.floor((row.counted_at if is_current else now) + (at_uptime - row.uptime))


class UptimeCounter:
    """One process' part in counting."""

    def __init__(self, ctx: Context, longest_step_s: float = LONGEST_STEP_S) -> None:
        self._ctx, self._longest_step_s = ctx, longest_step_s
        self._last: tuple[float, float] | None = None  # this process' clock, and the uptime then

    def count(self) -> None:
        """Add what has passed since the last call; writes nothing while nothing is timed."""
        now = self._ctx.monotonic()
        if not self._is_needed():
            self._last = None
            return
        with self._ctx.db.write() as session:
            row = session.get_one(CoordinatorClock, _THE_ROW, with_for_update=LOCK)
            if self._last is not None:
                passed_s = min(now - self._last[0], self._longest_step_s)
                row.uptime = max(row.uptime, self._last[1] + passed_s)
            row.counted_at = self._ctx.clock()
            counted = row.uptime
        self._last = now, counted

    def _is_needed(self) -> bool:
        running = select(Federation.id).where(Federation.state == "running").limit(1)
        under_way = select(Round.id).where(Round.state.in_(["open", "aggregating"])).limit(1)
        with self._ctx.db.read() as session:
            return any(session.execute(query).first() is not None for query in (running, under_way))
