"""Whatever sites, operators, clocks and crashes do, in any order: no update is lost, and none counts twice."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select
from support.databases import empty_postgres
from support.desk import OPERATOR, Desk, aggregate_until_idle, fedavg_plan, mean_bits, unreferenced_blobs
from support.random_histories import NAMES, RULES, World

from server.service import federations
from server.service.aggregation import LEASE_S
from server.service.cleaning import Cleaner
from server.service.retention import Retention
from server.service.transitions import waiting_for
from server.service.uptime import uptime
from server.store.database import Database
from server.store.tables import Absence, Blob, Federation, Model, Participant, Round, Update

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)  # explaining a failure would take minutes


class CoordinatorMachine(World, RuleBasedStateMachine):
    """Lets random events happen, and checks after each of them what must always hold."""

    def __init__(self, new_database: Callable[[], Database]) -> None:
        World.__init__(self, new_database)
        RuleBasedStateMachine.__init__(self)

    @initialize(
        quorum=st.sampled_from([0.5, 1.0]), share=st.sampled_from([0.6, 1.0]), early=st.sampled_from([3, 2, 4, 0])
    )
    def begin(self, quorum: float, share: float, early: int) -> None:
        self.plan = fedavg_plan(**RULES, quorum=quorum, sample_fraction=share)
        self.desk = Desk(self.db, self.plan, self.clock)
        for name in NAMES[:early]:
            self.enroll(name)

    # Given many rules, Hypothesis would disable a random half of them in each example, and few examples would get
    # anywhere. So there is one rule, with weights here.
    EVENTS = (
        *["everybody_uploads"] * 4,
        *["upload"] * 4,
        *["upload_part"] * 3,
        *["begin_put"] * 3,
        *["end_put"] * 3,
        *["upload_again", "upload_something_else"],
        *["join"] * 3,
        *["leave", "revoke"],
        *["pause", *["resume"] * 4, "cancel"],
        *["time_passes", "time_passes_unnoticed", "clock_jumps", "somebody_falls_silent", "somebody_falls_silent"],
        *["work"] * 5,
        *["work_a_step"] * 2,
        *["crash"] * 4,
        *["clean"],
    )

    @rule(event=st.sampled_from(EVENTS), data=st.data())
    def happens(self, event: str, data: st.DataObject) -> None:
        getattr(self, event)(data.draw)

    # Invariants.

    @invariant()
    def everything_adds_up(self) -> None:
        with self.db.read() as session:
            federation = session.execute(select(Federation)).scalar_one()
            rounds = list(session.execute(select(Round).order_by(Round.number)).scalars())
            stored = {(row.round_id, row.client_id): row for row in session.execute(select(Update)).scalars()}
            query = select(Model.number, Blob.digest).join(Blob, Blob.id == Model.blob_id).order_by(Model.number)
            published = {row.number: row.digest for row in session.execute(query)}
            waiting = waiting_for(session, self.ctx, federation)
        assert stored.keys() == self.accepted.keys(), "no accepted update is lost, none comes from nowhere"
        for key, (receipt, _) in self.accepted.items():
            row = stored[key]
            assert (row.digest, row.size_bytes, row.received_at) == (
                receipt.digest,
                receipt.size_bytes,
                receipt.received_at,
            )
        assert [row.number for row in rounds] == list(range(1, len(rounds) + 1))
        assert all(row.state in ("done", "failed") for row in rounds[:-1])
        done = [row for row in rounds if row.state == "done"]
        assert list(published) == [0, *(row.number for row in done)], "one model for each round that is done"
        assert federation.completed_rounds == len(done)
        for row in done:
            self.check_model(row, published[row.number] or "")
        for row in rounds:
            self.check_failure(row, federation)
        if federation.state == "running" and waiting is None:
            self.check_due(federation)
        if federation.state in ("finished", "cancelled"):
            assert not any(row.state == "open" for row in rounds)
        if not self.crashes:
            assert unreferenced_blobs(self.db) == set()

    def check_model(self, round_: Round, blob_digest: str) -> None:
        """Check that the model is the plain mean of the accepted updates and has never changed."""
        if round_.number not in self.models:
            bodies = [body for (round_id, _), (_, body) in self.accepted.items() if round_id == round_.id]
            assert self.desk.bits(round_.number) == mean_bits(bodies)
            self.models[round_.number] = blob_digest
        assert self.models[round_.number] == blob_digest

    def check_failure(self, round_: Round, federation: Federation) -> None:
        assert (round_.state == "failed") == bool(round_.reason)
        if round_.state in ("done", "failed") and "cancelled" not in round_.reason:
            with self.db.read() as session:
                chosen = select(Participant.client_id).where(Participant.round_id == round_.id)
                participants = set(session.execute(chosen).scalars())
                explained = select(Absence.client_id).where(Absence.round_id == round_.id)
                absent = set(session.execute(explained).scalars())
            uploaded = {client_id for round_id, client_id in self.accepted if round_id == round_.id}
            assert participants - uploaded <= absent, "whoever is missing is listed with a reason"
            assert not uploaded & absent
        if round_.state == "failed" and round_.id not in self.failed:
            self.failed.add(round_.id)
            assert federation.state in ("paused", "cancelled")
            assert round_.reason in federation.reason

    def check_due(self, federation: Federation) -> None:
        """Check that a running federation that is not waiting for anything is due."""
        with self.db.read() as session:
            now = uptime(session)
            assert federation.due_uptime is not None
            recheck_at = federation.look_uptime
            is_planned = recheck_at is not None and recheck_at <= now + self.plan.rounds.absent_after_s
            assert federation.due_uptime <= now or is_planned

    def teardown(self) -> None:
        """Check that a federation can still be completed, whatever has happened to it."""
        try:
            if hasattr(self, "desk"):
                self.bring_to_an_end()
        finally:
            self.db.close()

    def bring_to_an_end(self) -> None:
        for name in NAMES:
            if not any(site.name == name and site.active for site in self.sites):
                self.enroll(name)
        for _ in range(3 * self.plan.rounds.count):
            self.desk.wait(LEASE_S + 1)
            aggregate_until_idle(self.processes[0].worker)
            self.everything_adds_up()
            if self.has_ended():
                break
            federations.resume(self.ctx, OPERATOR, self.plan.name)
            self.everything_adds_up()
            for site in self.sites:
                self.put(self.part_of(site), self.processes[0])
        assert self.has_ended()
        Cleaner(self.ctx, Retention(0, 0, 0, 0)).clean()
        assert unreferenced_blobs(self.db) == set()


def run(new_database: Callable[[], Database], chance: int, examples: int, steps: int) -> None:
    """Run a few examples with their own seed: in one long run Hypothesis keeps varying the same few examples."""
    machine = seed(chance)(lambda: CoordinatorMachine(new_database))
    chosen = settings(max_examples=examples, stateful_step_count=steps, phases=PHASES)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("chance", range(4))
def test_invariants_hold_in_random_histories_on_sqlite(sqlite_template: Path, tmp_path: Path, chance: int) -> None:
    numbers = itertools.count()

    def new_database() -> Database:
        return Database(f"sqlite:///{shutil.copy(sqlite_template, tmp_path / f'{next(numbers)}.db')}")

    run(new_database, chance, examples=5, steps=40)


def test_invariants_hold_in_random_histories_on_postgresql(reused_postgres_url: str) -> None:
    def new_database() -> Database:
        empty_postgres(reused_postgres_url)
        return Database(reused_postgres_url)

    run(new_database, chance=4, examples=4, steps=30)
