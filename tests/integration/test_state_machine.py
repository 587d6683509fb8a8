"""Whatever sites, operators, clocks and crashes do, in any order: no update is lost, none counts twice."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
from support.plans import update_body
from support.service import OPERATOR, Clock, Desk, fedavg_plan, mean_bits, put, run_dry, unreferenced_blobs

from server.core.errors import Conflict, Gone, NotAllowed
from server.service import enrolment, federations, housekeeping
from server.service.aggregation import LEASE_S, Aggregator
from server.service.cleaning import Cleaner, Retention
from server.service.context import Context
from server.service.enrolment import Identity
from server.service.housekeeping import Heartbeats
from server.service.progress import waiting_for
from server.service.resumable_uploads import UploadPart, status
from server.service.uploads import Upload
from server.service.uptime import uptime
from server.store.session import Database
from server.store.tables import Absence, Blob, Federation, Model, Participant, Round, Update
from shared.schemas import JoinRequest, StatusReport, UpdateReceipt
from shared.wire import digest

STAGES = ("before-fold", "after-fold", "before-store", "before-publish", "after-publish")
NAMES = ("east", "north", "south", "west")
RULES = {
    "count": 3,
    "min_clients": 2,
    "deadline_s": 60,
    "upload_idle_s": 20,
    "upload_grace_s": 40,
    "join_deadline_s": 300,
    "absent_after_s": 120,
}
BODIES = [update_body(fedavg_plan(), {}, seed) for seed in range(40)]
RETENTION = Retention(resumable_s=100, torn_s=50, garbage_s=200)
SECONDS = st.sampled_from([1, 19, LEASE_S + 1, 61, 130, 301])
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)  # to explain a failure would take minutes
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Killed(BaseException):
    """kill -9."""


@dataclass
class Site:
    """What a site knows of itself, and what the test knows of it."""

    name: str
    token: str
    active: bool = True


@dataclass
class Process:
    """A coordinator process: its worker, and the PUTs that it is receiving."""

    ctx: Context
    worker: Aggregator = field(init=False)
    puts: list[tuple[Upload, bytes, tuple[int, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = Aggregator(self.ctx)


class Coordinator(RuleBasedStateMachine):
    """A federation, two processes that serve it, and four sites."""

    def __init__(self, new_database: Callable[[], Database]) -> None:
        super().__init__()
        self.db, self.clock = new_database(), Clock()
        self.processes = [Process(Context(self.db, self.clock)) for _ in range(2)]
        self.sites: list[Site] = []
        self.accepted: dict[tuple[int, str], tuple[UpdateReceipt, bytes]] = {}  # by round and client
        self.parts: dict[tuple[int, str], int] = {}  # bytes of resumable uploads
        self.models: dict[int, str] = {}  # digests of published blobs that have been checked
        self.failed: set[int] = set()
        self.crashes = 0
        self.seeds = itertools.count()

    @property
    def ctx(self) -> Context:
        return self.processes[0].ctx

    @initialize(
        quorum=st.sampled_from([0.5, 1.0]), share=st.sampled_from([0.6, 1.0]), early=st.sampled_from([3, 2, 4, 0])
    )
    def begin(self, quorum: float, share: float, early: int) -> None:
        self.plan = fedavg_plan(**RULES, quorum=quorum, sample_fraction=share)
        self.desk = Desk(self.db, self.plan, self.clock)
        for name in NAMES[:early]:
            self.enrol(name)

    # Hypothesis would switch off a random half of many rules for each example, and few of them would get anywhere
    # without the other half. So there is one rule, and the weights are here.
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

    # What the test may look up: the state of the database, never of the program.

    def federation(self) -> Federation:
        with self.db.read() as session:
            return session.execute(select(Federation)).scalar_one()

    def latest_round(self) -> Round | None:
        rounds = self.desk.rounds()
        return rounds[-1] if rounds else None

    def has_ended(self) -> bool:
        return self.federation().state in ("finished", "cancelled")

    def authenticate(self, site: Site) -> Identity | None:
        if site.active:
            return enrolment.authenticate(self.ctx, site.token)
        with pytest.raises(NotAllowed):
            enrolment.authenticate(self.ctx, site.token)
        return None

    def takes_part(self, round_: Round, who: Identity) -> bool:
        with self.db.read() as session:
            return session.get(Participant, (round_.id, who.client_id)) is not None

    def next_body(self) -> bytes:
        return BODIES[next(self.seeds) % len(BODIES)]

    # Sites.

    def join(self, draw: Draw) -> None:
        self.enrol(draw(st.sampled_from(NAMES)))

    def enrol(self, name: str) -> None:
        if self.has_ended():
            with pytest.raises(Conflict, match=r"is (finished|cancelled)"):
                enrolment.invite(self.ctx, OPERATOR, self.plan.name, 60)
            return
        token = enrolment.invite(self.ctx, OPERATOR, self.plan.name, 60).token
        request = JoinRequest(name=name, class_counts={"cat": 1})
        if any(site.name == name and site.active for site in self.sites):
            with pytest.raises(Conflict, match="is called"):
                enrolment.join(self.ctx, token, request)
        else:
            self.sites.append(Site(name, enrolment.join(self.ctx, token, request).token))

    def candidate(self, draw: Draw) -> tuple[Round, Identity] | None:
        """A site that may upload to the latest round."""
        return self.part_of(draw(st.sampled_from(self.sites))) if self.sites else None

    def part_of(self, site: Site) -> tuple[Round, Identity] | None:
        """The site's part in the latest round, unless it has uploaded; without a part it is refused at once."""
        round_ = self.latest_round()
        if round_ is None:
            return None
        who = self.authenticate(site)
        if who is None or (round_.id, who.client_id) in self.accepted:
            return None
        if self.takes_part(round_, who):
            return round_, who
        with pytest.raises(NotAllowed, match="was not chosen"):
            Upload(self.ctx, who, round_.id, None, None)
        return None

    def upload(self, draw: Draw) -> None:
        self.put(self.candidate(draw), self.process(draw))

    def put(self, part: tuple[Round, Identity] | None, process: Process) -> None:
        if part is None:
            return
        (round_, who), body = part, self.next_body()
        if round_.state != "open":
            with pytest.raises(Gone, match="takes no more updates"):
                put(process.ctx, who, round_.id, body)
            return
        self.accept(round_.id, who, put(process.ctx, who, round_.id, body), body)

    def everybody_uploads(self, draw: Draw) -> None:
        process = self.process(draw)
        for site in list(self.sites):
            self.put(self.part_of(site), process)

    def process(self, draw: Draw) -> Process:
        return draw(st.sampled_from(self.processes))

    def accept(self, round_id: int, who: Identity, receipt: UpdateReceipt, body: bytes) -> None:
        key = round_id, who.client_id
        assert key not in self.accepted
        assert (receipt.digest, receipt.size_bytes) == (digest(body), len(body))
        self.accepted[key] = receipt, body
        self.parts.pop(key, None)

    def upload_again(self, draw: Draw) -> None:
        if self.accepted:
            (round_id, client_id), (receipt, body) = draw(st.sampled_from(list(self.accepted.items())))
            assert put(self.ctx, self.identity(client_id), round_id, body) == receipt

    def upload_something_else(self, draw: Draw) -> None:
        if self.accepted:
            (round_id, client_id), (_, body) = draw(st.sampled_from(list(self.accepted.items())))
            other = BODIES[(BODIES.index(body) + 1) % len(BODIES)]
            with pytest.raises(Conflict, match="was accepted"):
                put(self.ctx, self.identity(client_id), round_id, other)

    def identity(self, client_id: str) -> Identity:
        return Identity(client_id, "", self.federation().id, self.plan.name)

    def upload_part(self, draw: Draw) -> None:
        found, share = self.candidate(draw), draw(st.sampled_from([0.1, 0.5, 1.0]))
        if found is None or found[0].state != "open":
            return
        round_, who = found
        key, body = (round_.id, who.client_id), BODIES[round_.number]
        begin = status(self.ctx, who, round_.id).offset_bytes
        assert begin == self.parts.get(key, 0)
        part = UploadPart(self.ctx, who, round_.id, begin, len(body), digest(body))
        end = min(len(body), begin + int(len(body) * share) + 1)
        part.feed(body[begin:end])
        self.parts[key] = end
        result = part.finish()
        if isinstance(result, UpdateReceipt):
            assert end == len(body)
            self.accept(round_.id, who, result, body)

    def begin_put(self, draw: Draw) -> None:
        """Its bytes come, but its end does not come yet."""
        found, process, body = self.candidate(draw), self.process(draw), self.next_body()
        if found is not None and found[0].state == "open":
            round_, who = found
            upload = Upload(process.ctx, who, round_.id, None, len(body))
            upload.feed(body)
            self.parts.pop((round_.id, who.client_id), None)
            process.puts.append((upload, body, (round_.id, who.client_id)))

    def end_put(self, draw: Draw) -> None:
        """The end of a PUT that began some steps ago: accepted, overtaken by events, or torn."""
        under_way = [(process, entry) for process in self.processes for entry in process.puts]
        if not under_way:
            return
        process, entry = draw(st.sampled_from(under_way))
        process.puts.remove(entry)
        upload, body, key = entry
        if draw(st.sampled_from([False, False, False, True])):
            upload.abandon()
            return
        try:
            receipt = upload.finish()
        except (Conflict, Gone, NotAllowed):
            upload.abandon()
            return
        if key in self.accepted:  # another request of this site was faster
            assert self.accepted[key][0] == receipt
        else:
            self.accept(key[0], self.identity(key[1]), receipt, body)

    def leave(self, draw: Draw) -> None:
        present = [site for site in self.sites if site.active]
        if present:
            site = draw(st.sampled_from(present))
            enrolment.leave(self.ctx, enrolment.authenticate(self.ctx, site.token), OPERATOR)
            site.active = False

    def revoke(self, draw: Draw) -> None:
        if self.sites:
            name = draw(st.sampled_from(self.sites)).name
            enrolment.revoke(self.ctx, OPERATOR, self.plan.name, name)
            for site in self.sites:
                site.active &= site.name != name

    # The operator.

    def pause(self, _draw: Draw) -> None:
        self.operate(federations.pause)

    def resume(self, _draw: Draw) -> None:
        self.operate(federations.resume)

    def operate(self, action: Callable[..., None]) -> None:
        if self.has_ended():
            with pytest.raises(Conflict, match="it cannot"):
                action(self.ctx, OPERATOR, self.plan.name)
        else:
            action(self.ctx, OPERATOR, self.plan.name)

    def cancel(self, draw: Draw) -> None:
        if draw(st.sampled_from(range(12))) == 11 and not self.has_ended():  # rarely: nothing comes after it
            federations.cancel(self.ctx, OPERATOR, self.plan.name)

    # Time, work and crashes.

    def time_passes(self, draw: Draw) -> None:
        self.desk.wait(draw(SECONDS))
        housekeeping.pass_deadlines(self.process(draw).ctx)

    def somebody_falls_silent(self, draw: Draw) -> None:
        """Time passes while some agents report, some poll and some are dead; the dead may still upload later."""
        beats, active = Heartbeats(), [site for site in self.sites if site.active]
        for site in draw(st.lists(st.sampled_from(active), max_size=4)) if active else []:
            who = enrolment.authenticate(self.ctx, site.token)
            if draw(st.booleans()):
                beats.note_report(who.client_id, self.clock(), StatusReport(activity="training"))
            else:
                beats.note(who.client_id, self.clock(), can_report=draw(st.booleans()))
        beats.flush(self.process(draw).ctx)
        self.desk.polling = False
        self.desk.wait(draw(SECONDS))
        self.desk.polling = True
        housekeeping.pass_deadlines(self.process(draw).ctx)

    def time_passes_unnoticed(self, draw: Draw) -> None:
        self.desk.wait(draw(SECONDS))

    def clock_jumps(self, draw: Draw) -> None:
        """Somebody sets the clock of the machine; nothing follows from it."""
        self.clock.jump(draw(st.sampled_from([-86400.0, 86400.0])))

    def work_a_step(self, draw: Draw) -> None:
        self.process(draw).worker.step()

    def work(self, draw: Draw) -> None:
        run_dry(self.process(draw).worker)

    def crash(self, draw: Draw) -> None:
        """A process dies at some stage of its work, or while it has none, and is started again."""
        place, stage = draw(st.sampled_from([0, 1])), draw(st.sampled_from(STAGES))

        def hook(reached: str) -> None:
            if reached == stage:
                raise Killed

        try:
            run_dry(Aggregator(self.processes[place].ctx, hook))
        except Killed:
            self.crashes += 1
        self.processes[place] = Process(Context(self.db, self.clock))

    def clean(self, draw: Draw) -> None:
        keep = draw(st.integers(0, 2))
        Cleaner(self.process(draw).ctx, replace(RETENTION, keep_round_uploads=keep)).clean()
        for round_id, client_id in list(self.parts):
            try:
                kept = status(self.ctx, self.identity(client_id), round_id).offset_bytes
            except Gone:
                kept = 0
            assert kept in (0, self.parts[round_id, client_id])
            if not kept:
                del self.parts[round_id, client_id]

    # What always holds.

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
        """The plain mean of the updates that were accepted for the round, published once and never touched again."""
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
        """A running federation says what it waits for, unless its time is over and nobody has looked yet."""
        with self.db.read() as session:
            now = uptime(session)
            assert federation.due_uptime is not None
            look_at = federation.look_uptime
            is_planned = look_at is not None and look_at <= now + self.plan.rounds.absent_after_s
            assert federation.due_uptime <= now or is_planned

    def teardown(self) -> None:
        """However it went, it goes on from there: a federation that has not ended can still be brought to its end."""
        try:
            if hasattr(self, "desk"):
                self.bring_to_an_end()
        finally:
            self.db.close()

    def bring_to_an_end(self) -> None:
        for name in NAMES:
            if not any(site.name == name and site.active for site in self.sites):
                self.enrol(name)
        for _ in range(3 * self.plan.rounds.count):
            self.desk.wait(LEASE_S + 1)
            run_dry(self.processes[0].worker)
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
    """Several short runs with their own seeds: in one long run Hypothesis varies a few examples again and again."""
    machine = seed(chance)(lambda: Coordinator(new_database))
    chosen = settings(max_examples=examples, stateful_step_count=steps, phases=PHASES)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("chance", range(4))
def test_on_sqlite(sqlite_template: Path, tmp_path: Path, chance: int) -> None:
    numbers = itertools.count()

    def new_database() -> Database:
        return Database(f"sqlite:///{shutil.copy(sqlite_template, tmp_path / f'{next(numbers)}.db')}")

    run(new_database, chance, examples=5, steps=40)


def test_on_postgresql(reused_postgres_url: str) -> None:
    def new_database() -> Database:
        empty_postgres(reused_postgres_url)
        return Database(reused_postgres_url)

    run(new_database, chance=4, examples=4, steps=30)
