"""The background worker's main job: fold updates in as they land, and finish rounds, exactly once over all processes.

A process that wants to fold a round takes its lease in the database and keeps the running mean in memory. When it dies
the lease runs out, and another process starts again from the stored updates; the mean is exact, so the result is the
same. The transaction that publishes the new model checks the lease once more.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.core.aggregation import RoundFold, personal_part
from server.core.rounds import Fail
from server.service.context import Context, facts_of, half_of, load_roster
from server.service.history import pooled_accuracy
from server.service.progress import advance, fail_round
from server.service.tensors import load_part, load_tensors
from server.store import blobs
from server.store.objects import ObjectStoreError
from server.store.session import LOCK
from server.store.tables import Client, Federation, Model, Round, Update
from shared.methods.base import PERSONAL, SHARED, ClientRecord, ServerState, Tensors
from shared.schemas import TrainingReport
from shared.wire import encode

logger = logging.getLogger(__name__)
LEASE_S = 10.0


class LeaseLost(Exception):
    """Another process aggregates this round."""


class Aggregator:
    """One process' folds. `step` does everything that can be done now and returns whether it did anything."""

    def __init__(self, ctx: Context, on_stage: Callable[[str], None] = lambda _stage: None) -> None:
        self._ctx = ctx
        self._folds: dict[int, RoundFold] = {}
        self._on_stage = on_stage  # for tests that kill the process between two stages

    def step(self) -> bool:
        """Fold what has landed, finish what is complete."""
        with self._ctx.db.read() as session:
            rounds = rounds_to_fold(session)
        for gone in self._folds.keys() - {round_id for round_id, _, _ in rounds}:
            del self._folds[gone]
        worked = False
        for round_id, state, landed in rounds:
            if state == "open" and round_id in self._folds and landed == len(self._folds[round_id].folded):
                continue  # everything that has landed is in the mean already
            try:
                worked |= self._step_round(round_id, state)
            except LeaseLost:
                self._folds.pop(round_id, None)
            except (SQLAlchemyError, ObjectStoreError):
                logger.exception("the storage failed during aggregation; trying again")
            except Exception as error:  # a round that cannot be aggregated must not look like a slow one
                logger.exception("aggregation failed")
                self._fail(round_id, Fail("aggregation failed", f"{type(error).__name__}: {error}"))
        return worked

    def _step_round(self, round_id: int, state: str) -> bool:
        fold = self._folds.get(round_id)
        done = fold.folded if fold else set()
        with self._ctx.db.read() as session:
            query = select(Update.client_id, Update.blob_id, Update.report).where(Update.round_id == round_id)
            landed = [row for row in session.execute(query.order_by(Update.client_id)) if row.client_id not in done]
            federation = session.get_one(Federation, session.get_one(Round, round_id).federation_id)
        if not landed and state != "aggregating":
            return False
        if not self._take_lease(round_id):
            raise LeaseLost
        with self._keep_lease(round_id):
            if fold is None:
                fold = self._folds[round_id] = RoundFold(half_of(federation.plan))
            for row in landed:
                self._on_stage("before-fold")
                tensors = load_part(self._ctx.db, row.blob_id, SHARED)
                fold.add(row.client_id, tensors, TrainingReport.model_validate_json(row.report))
                self._on_stage("after-fold")
            if state == "aggregating":
                self._finish(round_id, federation, fold)
                del self._folds[round_id]
        return True

    def _take_lease(self, round_id: int) -> bool:
        now, me = self._ctx.clock(), self._ctx.process_id
        free = or_(Round.lease_owner.is_(None), Round.lease_owner == me, Round.lease_until < now)
        under_way = Round.state.in_(["open", "aggregating"])
        with self._ctx.db.write() as session:
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

    def _finish(self, round_id: int, federation: Federation, fold: RoundFold) -> None:
        ctx = self._ctx
        with ctx.db.read() as session:
            round_ = session.get_one(Round, round_id)
            base = session.get_one(Model, (federation.id, round_.base_model))
        facts, roster = facts_of(round_.facts), load_roster(round_.roster)
        private = load_tensors(ctx.db, base.private_blob_id) if base.private_blob_id else {}
        previous = ServerState(load_tensors(ctx.db, base.blob_id), private)
        state = fold.finish(previous, self._uploads(round_id, roster), roster, facts)
        self._on_stage("before-store")
        now = ctx.clock()
        metadata = {"plan": federation.plan, "model": str(round_.number)}
        model_id = blobs.store(ctx.db, encode(state.shared, metadata), now)
        private_id = blobs.store(ctx.db, encode(state.private), now) if state.private else None
        self._on_stage("before-publish")
        with ctx.db.write() as session:
            self._publish(session, round_id, model_id, private_id)
        self._on_stage("after-publish")

    def _uploads(self, round_id: int, roster: list[ClientRecord]) -> Iterator[tuple[ClientRecord, Tensors]]:
        """The personal tensors of the round's updates, one at a time, in the order of the clients' names.

        They are read here and not kept from the fold: all of them together could be as large as all the models.
        """
        records = {client.id: client for client in roster}
        with self._ctx.db.read() as session:
            query = select(Client.name, Update.blob_id).join(Update, Update.client_id == Client.id)
            rows = sorted(
                (name, blob_id) for name, blob_id in session.execute(query.where(Update.round_id == round_id))
            )
        for name, blob_id in rows:
            yield records[name], personal_part(load_part(self._ctx.db, blob_id or "", PERSONAL))

    def _publish(self, session: Session, round_id: int, model_id: str, private_id: str | None) -> None:
        ctx = self._ctx
        round_ = session.get_one(Round, round_id)
        federation = session.get_one(Federation, round_.federation_id, with_for_update=LOCK)
        session.refresh(round_, with_for_update=LOCK)
        if round_.state != "aggregating" or round_.lease_owner != ctx.process_id:
            blobs.drop(session, model_id)
            if private_id is not None:
                blobs.drop(session, private_id)
            return
        session.add(
            Model(
                federation_id=federation.id,
                number=round_.number,
                blob_id=model_id,
                private_blob_id=private_id,
                created_at=ctx.clock(),
            )
        )
        base = session.get_one(Model, (federation.id, round_.base_model))
        old_private, base.private_blob_id = base.private_blob_id, None
        session.flush()
        if old_private is not None:
            blobs.drop(session, old_private)
        round_.state, round_.lease_owner, round_.lease_until = "done", None, None
        round_.closed_at = ctx.clock()
        federation.completed_rounds += 1
        _note_accuracy(session, federation, round_.base_model)
        ctx.touch(federation)
        advance(session, ctx, federation)

    def _fail(self, round_id: int, why: Fail) -> None:
        self._folds.pop(round_id, None)
        with self._ctx.db.write() as session:
            round_ = session.get_one(Round, round_id)
            federation = session.get_one(Federation, round_.federation_id, with_for_update=LOCK)
            session.refresh(round_)
            if round_.state in ("open", "aggregating"):
                fail_round(session, self._ctx, federation, round_, why)


def rounds_to_fold(session: Session) -> list[tuple[int, str, int]]:
    """Rounds under way that are aggregating or have updates: id, state, number of updates.

    One query, which also leaves out the many open rounds that nobody has uploaded to yet.
    """
    landed = func.count(Update.client_id)
    query = (
        select(Round.id, Round.state, landed)
        .outerjoin(Update, Update.round_id == Round.id)
        .where(Round.state.in_(["open", "aggregating"]))
        .group_by(Round.id, Round.state)
        .having((landed > 0) | (Round.state == "aggregating"))
    )
    return [(row[0], row[1], row[2]) for row in session.execute(query.order_by(Round.id))]


def _note_accuracy(session: Session, federation: Federation, model_number: int) -> None:
    """Remember the best model that the clients have measured, and how many rounds ago that was."""
    accuracy = pooled_accuracy(session, federation, model_number)
    if accuracy is None:
        return
    if federation.best_accuracy is None or accuracy > federation.best_accuracy:
        federation.best_accuracy, federation.best_model, federation.stale_rounds = accuracy, model_number, 0
    else:
        federation.stale_rounds += 1
