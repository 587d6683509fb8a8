"""The background worker's main job: fold in updates as they arrive, and finish each round exactly once.

To fold a round, a process takes its lease in the database and keeps the running mean in memory. If the process dies,
the lease expires and another process starts over from the stored updates; the mean is exact, so the result is the same.
The transaction that publishes the new model checks the lease once more.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import func, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.core.folding import RoundFold, blame, first_nonfinite, peak_of
from server.core.lifecycle import UNDER_WAY, Fail
from server.service.best_model import update_best_model
from server.service.context import Context, notify_agents, plan_of, round_context, server_half_of, wake_cleaner
from server.service.isolation import FailureIsolation, is_storage_failure
from server.service.method_calls import finish_round, personal_tensors
from server.service.retention import drop_old_states, require_blob_id
from server.service.stored_tensors import load_personal, load_shared, load_tensors
from server.service.transitions import advance, fail_round
from server.service.uptime import uptime
from server.store import blobs
from server.store.database import LOCK
from server.store.objects.store import ObjectMissing
from server.store.tables import Client, Federation, Model, Round, Update
from shared.learning.methods.base import ClientRecord, RoundContext, ServerHalf, ServerState
from shared.tensors.arrays import Arrays, as_arrays
from shared.tensors.names import PERSONAL, SHARED, add_prefix, strip_prefix
from shared.tensors.wire import Encoded

logger = logging.getLogger(__name__)
LEASE_S = 10.0


class LeaseLost(Exception):
    """Another process is aggregating this round."""


class NotFinite(Exception):
    """The result of the round contains an infinity or NaN."""


class Aggregator:
    """The folds of one process."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._folds: dict[int, RoundFold] = {}
        self._isolation = FailureIsolation(ctx)

    def step(self) -> bool:
        """Fold all updates that have arrived and finish all complete rounds; return whether anything was done."""
        with self._ctx.db.read() as session:
            rounds = rounds_to_fold(session)
        for gone in self._folds.keys() - {row.id for row in rounds}:
            del self._folds[gone]
        worked = False
        for row in rounds:
            if row.state == "open" and row.id in self._folds and row.landed == len(self._folds[row.id].folded):
                continue  # every update so far is already in the mean
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
            logger.exception("aggregation of round id %d failed", round_id)
            self._fail(round_id, self._reason(round_id, error))
        return False

    def _reason(self, round_id: int, error: Exception) -> Fail:
        if isinstance(error, NotFinite):
            return Fail("its result is not finite", f"{error}; {self._blame(round_id)}")
        if isinstance(error, ObjectMissing):
            return Fail("stored tensors are missing", error.message)
        return Fail("aggregation failed", f"{type(error).__name__}: {error}")

    def _blame(self, round_id: int) -> str:
        """Return whose update is to blame; reads all of them again, one at a time."""
        with self._ctx.db.read() as session:
            round_ = session.get_one(Round, round_id)
            federation = session.get_one(Federation, round_.federation_id)
        half, base = server_half_of(federation.plan), self._base_of_fold(federation, round_)
        return blame([peak_of(name, self._update(half, base, blob_id)) for name, blob_id in self._stored(round_id)])

    def _update(self, half: ServerHalf, base: Arrays, blob_id: str) -> Arrays:
        """Return the tensors of a stored update as they were before it was compressed."""
        tensors = load_tensors(self._ctx.db, blob_id)
        shared = as_arrays(half.received(strip_prefix(tensors, SHARED), base))
        return add_prefix(shared, SHARED) | add_prefix(strip_prefix(tensors, PERSONAL), PERSONAL)

    def _stored(self, round_id: int) -> list[tuple[str, str]]:
        """Return (client name, blob id) of the round's updates, sorted by name."""
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
        context = round_context(round_)
        clients = {client.id: client for client in context.roster}
        with self._keep_lease(round_id):
            if fold is None:
                base = self._base_of_fold(federation, round_)
                fold = self._folds[round_id] = RoundFold(server_half_of(federation.plan), base)
            for name, blob_id in landed:
                self._fold(fold, clients[name], blob_id)
            if state == "aggregating":
                self._finish(round_, federation, fold, context)
                del self._folds[round_id]
        return True

    def _take_lease(self, round_id: int) -> bool:
        me = self._ctx.process_id
        with self._ctx.db.write() as session:
            now = uptime(session)
            # No lease lasts longer than LEASE_S: this program did not write one that ends later.
            is_over = (Round.lease_until < now) | (Round.lease_until > now + LEASE_S)
            is_free = or_(Round.lease_owner.is_(None), Round.lease_owner == me, Round.lease_until.is_(None), is_over)
            taken = session.execute(
                update(Round)
                .where(Round.id == round_id, is_free, Round.state.in_(UNDER_WAY))
                .values(lease_owner=me, lease_until=now + LEASE_S)
                .execution_options(synchronize_session=False)
            )
            return bool(taken.rowcount)  # type: ignore[attr-defined]  # an UPDATE's result has it

    @contextmanager
    def _keep_lease(self, round_id: int) -> Iterator[None]:
        """Renew the lease in the background while the block runs."""
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

    def _base_of_fold(self, federation: Federation, round_: Round) -> Arrays:
        """Return the model that compressed updates of a round are differences to; nothing if they are not."""
        if plan_of(federation.plan).training.update_compression == "none":
            return {}
        with self._ctx.db.read() as session:
            base_id = require_blob_id(session, session.get_one(Model, (federation.id, round_.base_model)))
        return load_tensors(self._ctx.db, base_id)

    def _fold(self, fold: RoundFold, client: ClientRecord, blob_id: str) -> None:
        fold.arrays = load_shared(self._ctx.db, blob_id, fold.arrays)
        fold.add(client, fold.arrays)

    def _finish(self, round_: Round, federation: Federation, fold: RoundFold, context: RoundContext) -> None:
        ctx = self._ctx
        with ctx.db.read() as session:
            base = session.get_one(Model, (federation.id, round_.base_model))
            base_id = require_blob_id(session, base)
        uploads = _StoredUploads(self, round_.id, context)
        state = finish_round(ctx.db, federation.plan, base, base_id, fold.mean(), uploads, context)
        _require_finite(state)
        model_id = private_id = None
        try:
            model_id = self._store_model(state, {"plan": federation.plan, "model": str(round_.number)})
            if state.private:
                private_id = blobs.store(ctx.db, Encoded(state.private))
                self._require_finite_personal(federation, private_id, context)
            self._publish(round_.id, model_id, private_id)
        except Exception:  # the next attempt will write new blobs
            blobs.try_remove(ctx.db, model_id, private_id)
            raise

    def _require_finite_personal(self, federation: Federation, private_id: str, context: RoundContext) -> None:
        """Raise NotFinite rather than publish a state that breaks one of the clients."""
        for client in context.roster:
            name = first_nonfinite(personal_tensors(self._ctx.db, federation.plan, private_id, client, context))
            if name is not None:
                raise NotFinite(f"{name!r} for {client.id!r}")

    def personal_uploads(self, round_id: int, context: RoundContext) -> Iterator[tuple[ClientRecord, Arrays]]:
        """Yield the personal tensors of the round's updates, sorted by client name.

        They are read again rather than kept from the fold: together they could be as large as all the models.
        """
        clients = {client.id: client for client in context.roster}
        for name, blob_id in self._stored(round_id):
            yield clients[name], load_personal(self._ctx.db, blob_id)

    def _store_model(self, state: ServerState, metadata: dict[str, str]) -> str:
        return blobs.store(self._ctx.db, Encoded(state.shared, metadata))

    def _publish(self, round_id: int, model_id: str, private_id: str | None) -> None:
        ctx = self._ctx
        with ctx.db.write() as session:
            federation, round_ = self._lock(session, round_id)
            if round_.state != "aggregating" or round_.lease_owner != ctx.process_id:
                for blob_id in filter(None, (model_id, private_id)):
                    blobs.remove_in(session, blob_id)
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
            round_.closed_at = ctx.clock()  # until now, when it stopped accepting updates
            federation.completed_rounds = base.rounds_done + 1
            update_best_model(session, federation, round_.base_model)
            notify_agents(federation)
            wake_cleaner(federation)
            advance(session, ctx, federation)

    @staticmethod
    def _lock(session: Session, round_id: int) -> tuple[Federation, Round]:
        round_ = session.get_one(Round, round_id)
        federation = session.get_one(Federation, round_.federation_id, with_for_update=LOCK)
        session.refresh(round_, with_for_update=LOCK)
        return federation, round_

    def _fail(self, round_id: int, why: Fail) -> None:
        """Fail the round unless another process holds or last held the lease: it may be about to finish the round."""
        self._folds.pop(round_id, None)
        with self._ctx.db.write() as session:
            federation, round_ = self._lock(session, round_id)
            is_mine = round_.lease_owner in (None, self._ctx.process_id)
            if round_.state in UNDER_WAY and is_mine:
                fail_round(session, self._ctx, federation, round_, why)


@dataclass(frozen=True)
class _StoredUploads:
    """A round's personal tensors, which are read again each time somebody iterates over them."""

    aggregator: Aggregator
    round_id: int
    context: RoundContext

    def __iter__(self) -> Iterator[tuple[ClientRecord, Arrays]]:
        return self.aggregator.personal_uploads(self.round_id, self.context)


@dataclass(frozen=True)
class FoldableRound:
    """A round under way that has received updates."""

    id: int
    federation_id: int
    state: str
    landed: int  # updates


def rounds_to_fold(session: Session) -> list[FoldableRound]:
    """Return the rounds with updates, in one query: thousands may be waiting for their first."""
    query = (
        select(Round.id, Round.federation_id, Round.state, func.count())
        .join(Update, Update.round_id == Round.id)
        .where(Round.state.in_(UNDER_WAY))
        .group_by(Round.id, Round.federation_id, Round.state)
    )
    return [FoldableRound(*row) for row in session.execute(query.order_by(Round.id))]


def _require_finite(state: ServerState) -> None:
    """Raise NotFinite rather than publish something permanently broken."""
    for what, tensors in (("the global model", state.shared), ("the server's state", state.private)):
        name = first_nonfinite(tensors)
        if name is not None:
            raise NotFinite(f"{name!r} of {what}")
