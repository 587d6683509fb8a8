"""The background worker's main job: fold updates in as they land, and finish rounds, exactly once over all processes.

A process that wants to fold a round takes its lease in the database and keeps the running mean in memory. When it dies
the lease runs out, and another process starts again from the stored updates; the mean is exact, so the result is the
same. The transaction that publishes the new model checks the lease once more.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.core.aggregation import RoundFold, blame, first_nonfinite, peak_of, personal_part
from server.core.rounds import Fail
from server.service.context import Context, facts_of, half_of, load_roster
from server.service.isolation import Isolation, is_storage_failure
from server.service.models import blob_of, drop_old_states, note_accuracy
from server.service.progress import advance, fail_round
from server.service.tensors import load_part, load_tensors
from server.service.uptime import uptime
from server.store import blobs
from server.store.objects import ObjectMissing
from server.store.session import LOCK
from server.store.tables import Client, Federation, Model, Round, Update
from shared.methods.base import PERSONAL, SHARED, ClientRecord, Facts, ServerState, Tensors
from shared.wire import encode

logger = logging.getLogger(__name__)
LEASE_S = 10.0


class LeaseLost(Exception):
    """Another process aggregates this round."""


class NotFinite(Exception):
    """The round's result holds an infinity or a NaN."""


class Aggregator:
    """One process' folds. `step` does everything that can be done now and returns whether it did anything."""

    def __init__(self, ctx: Context, on_stage: Callable[[str], None] = lambda _stage: None) -> None:
        self._ctx = ctx
        self._folds: dict[int, RoundFold] = {}
        self._isolation = Isolation(ctx)
        self._on_stage = on_stage  # for tests that kill the process between two stages

    def step(self) -> bool:
        """Fold what has landed, finish what is complete."""
        with self._ctx.db.read() as session:
            rounds = rounds_to_fold(session)
        for gone in self._folds.keys() - {row.id for row in rounds}:
            del self._folds[gone]
        worked = False
        for row in rounds:
            if row.state == "open" and row.id in self._folds and row.landed == len(self._folds[row.id].folded):
                continue  # everything that has landed is in the mean already
            with self._isolation.of(row.federation_id):
                worked |= self._try_round(row.id, row.state)
        return worked

    def _try_round(self, round_id: int, state: str) -> bool:
        try:
            return self._step_round(round_id, state)
        except LeaseLost:
            self._folds.pop(round_id, None)
        except Exception as error:
            if is_storage_failure(error):
                raise
            # A round that cannot be aggregated must not look like a slow one.
            logger.exception("the aggregation of round id %d failed", round_id)
            self._fail(round_id, self._reason(round_id, error))
        return False

    def _reason(self, round_id: int, error: Exception) -> Fail:
        if isinstance(error, NotFinite):
            return Fail("its result holds values that are not finite", f"{error}; {self._blame(round_id)}")
        if isinstance(error, ObjectMissing):
            return Fail("stored tensors are missing", error.message)
        return Fail("aggregation failed", f"{type(error).__name__}: {error}")

    def _blame(self, round_id: int) -> str:
        """Whose update was it? To answer, all of them are read once more, one at a time."""
        return blame([peak_of(name, load_tensors(self._ctx.db, blob_id)) for name, blob_id in self._stored(round_id)])

    def _stored(self, round_id: int) -> list[tuple[str, str]]:
        """The round's updates by the names of their clients, in their order."""
        query = select(Client.name, Update.blob_id).join(Update, Update.client_id == Client.id)
        with self._ctx.db.read() as session:
            rows = session.execute(query.where(Update.round_id == round_id)).all()
        return sorted((name, blob_id or "") for name, blob_id in rows)

    def _step_round(self, round_id: int, state: str) -> bool:
        fold = self._folds.get(round_id)
        done = fold.folded if fold else set()
        landed = [(name, blob_id) for name, blob_id in self._stored(round_id) if name not in done]
        if not landed and state != "aggregating":
            return False
        with self._ctx.db.read() as session:
            round_ = session.get_one(Round, round_id)
            federation = session.get_one(Federation, round_.federation_id)
        if not self._take_lease(round_id):
            raise LeaseLost
        roster = {client.id: client for client in load_roster(round_.roster)}
        with self._keep_lease(round_id):
            if fold is None:
                fold = self._folds[round_id] = RoundFold(half_of(federation.plan))
            for name, blob_id in landed:
                self._on_stage("before-fold")
                fold.add(roster[name], load_part(self._ctx.db, blob_id, SHARED))
                self._on_stage("after-fold")
            if state == "aggregating":
                self._finish(round_, federation, fold, list(roster.values()))
                del self._folds[round_id]
        return True

    def _take_lease(self, round_id: int) -> bool:
        me, under_way = self._ctx.process_id, Round.state.in_(["open", "aggregating"])
        with self._ctx.db.write() as session:
            now = uptime(session)
            # Nobody leases for longer than LEASE_S: what lies further ahead was not written by this program.
            over = (Round.lease_until < now) | (Round.lease_until > now + LEASE_S)
            free = or_(Round.lease_owner.is_(None), Round.lease_owner == me, Round.lease_until.is_(None), over)
            taken = session.execute(
                update(Round)
                .where(Round.id == round_id, free, under_way)
                .values(lease_owner=me, lease_until=now + LEASE_S)
                .execution_options(synchronize_session=False)
            )
            return bool(taken.rowcount)  # type: ignore[attr-defined]  # an UPDATE's result has it

    @contextmanager
    def _keep_lease(self, round_id: int) -> Iterator[None]:
        """Renew the lease in the background for as long as the work takes."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(LEASE_S / 3):
                try:
                    if not self._take_lease(round_id):
                        return
                except SQLAlchemyError:
                    logger.exception("the lease could not be renewed; trying again")

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _finish(self, round_: Round, federation: Federation, fold: RoundFold, roster: list[ClientRecord]) -> None:
        ctx, facts = self._ctx, facts_of(round_.facts)
        with ctx.db.read() as session:
            base = session.get_one(Model, (federation.id, round_.base_model))
            base_id = blob_of(session, base)
        private = load_tensors(ctx.db, base.private_blob_id) if base.private_blob_id else {}
        previous = ServerState(load_tensors(ctx.db, base_id), private)
        state = fold.finish(previous, self._uploads(round_.id, roster), roster, facts)
        _refuse_nonfinite(federation, state, roster, facts)
        self._on_stage("before-store")
        metadata = {"plan": federation.plan, "model": str(round_.number)}
        model_id = private_id = None
        try:
            model_id = blobs.store(ctx.db, encode(state.shared, metadata))
            private_id = blobs.store(ctx.db, encode(state.private)) if state.private else None
            self._on_stage("before-publish")
            with ctx.db.write() as session:
                self._publish(session, round_.id, model_id, private_id)
        except Exception:  # it will be tried again, with new blobs
            blobs.discard(ctx.db, model_id, private_id)
            raise
        self._on_stage("after-publish")

    def _uploads(self, round_id: int, roster: list[ClientRecord]) -> Iterator[tuple[ClientRecord, Tensors]]:
        """The personal tensors of the round's updates, one at a time, in the order of the clients' names.

        They are read here and not kept from the fold: all of them together could be as large as all the models.
        """
        records = {client.id: client for client in roster}
        for name, blob_id in self._stored(round_id):
            yield records[name], personal_part(load_part(self._ctx.db, blob_id, PERSONAL))

    def _publish(self, session: Session, round_id: int, model_id: str, private_id: str | None) -> None:
        ctx = self._ctx
        federation, round_ = self._lock(session, round_id)
        if round_.state != "aggregating" or round_.lease_owner != ctx.process_id:
            blobs.drop(session, model_id)
            if private_id is not None:
                blobs.drop(session, private_id)
            return
        base = session.get_one(Model, (federation.id, round_.base_model))
        session.add(
            Model(
                federation_id=federation.id,
                number=round_.number,
                blob_id=model_id,
                private_blob_id=private_id,
                rounds_done=base.rounds_done + 1,
                created_at=ctx.clock(),
            )
        )
        session.flush()
        drop_old_states(session, federation)
        round_.state, round_.lease_owner, round_.lease_until = "done", None, None
        round_.closed_at = ctx.clock()
        federation.completed_rounds = base.rounds_done + 1
        note_accuracy(session, federation, round_.base_model)
        ctx.touch(federation)
        advance(session, ctx, federation)

    @staticmethod
    def _lock(session: Session, round_id: int) -> tuple[Federation, Round]:
        round_ = session.get_one(Round, round_id)
        federation = session.get_one(Federation, round_.federation_id, with_for_update=LOCK)
        session.refresh(round_, with_for_update=LOCK)
        return federation, round_

    def _fail(self, round_id: int, why: Fail) -> None:
        """Not while another process holds the lease, or held it last: it may be about to finish the round."""
        self._folds.pop(round_id, None)
        with self._ctx.db.write() as session:
            federation, round_ = self._lock(session, round_id)
            mine = round_.lease_owner in (None, self._ctx.process_id)
            if round_.state in ("open", "aggregating") and mine:
                fail_round(session, self._ctx, federation, round_, why)


@dataclass(frozen=True)
class FoldableRound:
    """A round under way that somebody has uploaded to."""

    id: int
    federation_id: int
    state: str
    landed: int  # updates


def rounds_to_fold(session: Session) -> list[FoldableRound]:
    """Find them with one query: thousands of rounds may be waiting for their first update."""
    query = (
        select(Round.id, Round.federation_id, Round.state, func.count())
        .join(Update, Update.round_id == Round.id)
        .where(Round.state.in_(["open", "aggregating"]))
        .group_by(Round.id, Round.federation_id, Round.state)
    )
    return [FoldableRound(*row) for row in session.execute(query.order_by(Round.id))]


def _refuse_nonfinite(federation: Federation, state: ServerState, roster: list[ClientRecord], facts: Facts) -> None:
    """Keep nothing that would be broken for good, for all clients or for one of them."""
    for what, tensors in (("the global model", state.shared), ("the server's state", state.private)):
        name = first_nonfinite(tensors)
        if name is not None:
            raise NotFinite(f"{name!r} of {what}")
    if not state.private:  # what is personal then follows from the plan alone
        return
    half = half_of(federation.plan)
    for client in roster:
        name = first_nonfinite(half.personal(state, client, roster, facts))
        if name is not None:
            raise NotFinite(f"{name!r} for {client.id!r}")
