"""Sign-ins to the dashboard, in the audit log: every replica learns from it which sessions have ended."""

import json
import threading

from sqlalchemy import func, select

from server.service.audit import record_action
from server.service.context import Actor, Context
from server.store.tables import AuditEntry

_SIGN_OUT = "dashboard.sign-out"


def record_sign_in(ctx: Context, actor: Actor) -> None:
    """Record that somebody signed in."""
    with ctx.db.write() as session:
        record_action(session, ctx, actor, "dashboard.sign-in")


def record_sign_out(ctx: Context, actor: Actor, session_id: str) -> None:
    """Record that a session has ended."""
    with ctx.db.write() as session:
        record_action(session, ctx, actor, _SIGN_OUT, ended=session_id)


class EndedSessions:
    """The sessions that have been signed out of, on any replica, within the longest life of a session."""

    def __init__(self, ctx: Context, longest_s: float) -> None:
        self._ctx, self._longest_s = ctx, longest_s
        self._seen: int | None = None  # the newest audit entry that has been read
        self._ended: dict[str, float] = {}
        self._lock = threading.Lock()

    def holds(self, session_id: str) -> bool:
        """Return whether this session has ended. Reads only what was added to the audit log since the last call."""
        with self._lock:
            self._catch_up()
            return session_id in self._ended

    def _catch_up(self) -> None:
        oldest = self._ctx.clock() - self._longest_s
        with self._ctx.db.read() as session:
            newest = session.execute(select(func.max(AuditEntry.id))).scalar() or 0
            if newest == self._seen:
                return
            query = select(AuditEntry.at, AuditEntry.detail).where(AuditEntry.action == _SIGN_OUT)
            if self._seen is None:
                query = query.where(AuditEntry.at >= oldest)
            else:
                query = query.where(AuditEntry.id > self._seen)
            added = session.execute(query.where(AuditEntry.id <= newest)).all()
        self._seen = newest
        self._ended |= {json.loads(detail)["ended"]: at for at, detail in added}
        self._ended = {key: at for key, at in self._ended.items() if at >= oldest}
