"""Isolates federations in background work: a failing one never affects others, and is paused if it keeps failing."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from server.service.context import Context
from server.service.transitions import set_state
from server.store.database import LOCK
from server.store.failures import StorageFull
from server.store.objects.store import ObjectMissing, ObjectStoreError
from server.store.tables import Federation

logger = logging.getLogger(__name__)
FAILURES_BEFORE_PAUSE = 5


def is_storage_failure(error: Exception) -> bool:
    """Return whether the database or object store is unavailable or full, which is no federation's fault."""
    if isinstance(error, ObjectMissing):
        return False
    kinds = OperationalError | InterfaceError | InternalError | PoolTimeout | ObjectStoreError | StorageFull
    return isinstance(error, kinds)


@dataclass
class Outcome:
    """How work on a federation ended."""

    storage_failed: bool = False


class FailureIsolation:
    """Counts consecutive failures per federation, for one kind of work in one process."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._failures: defaultdict[int, int] = defaultdict(int)

    @contextmanager
    def of(self, federation_id: int) -> Iterator[Outcome]:
        """Contain all exceptions raised in the block, which works on one federation."""
        outcome = Outcome()
        try:
            yield outcome
        except Exception as error:
            logger.exception("background work for federation %d failed; trying again", federation_id)
            outcome.storage_failed = is_storage_failure(error)
            if not outcome.storage_failed:
                self._count(federation_id, error)
        else:
            self._failures.pop(federation_id, None)

    def _count(self, federation_id: int, error: Exception) -> None:
        self._failures[federation_id] += 1
        if self._failures[federation_id] < FAILURES_BEFORE_PAUSE:
            return
        try:
            self._pause(federation_id, f"{type(error).__name__}: {error}"[:500])
        except Exception:
            logger.exception("federation %d could not be paused; trying again", federation_id)
        else:
            del self._failures[federation_id]

    def _pause(self, federation_id: int, detail: str) -> None:
        with self._ctx.db.write() as session:
            federation = session.get_one(Federation, federation_id, with_for_update=LOCK)
            if federation.state == "running":
                reason = f"the coordinator failed to process it {FAILURES_BEFORE_PAUSE} times in a row"
                set_state(session, self._ctx, federation, "paused", reason, detail)
