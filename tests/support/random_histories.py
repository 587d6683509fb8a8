"""Everything that may happen to a federation: sites, operators, time, work, and crashes, in any order."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from sqlalchemy import select
from support.crashes import STAGES, InterruptibleAggregator, Killed, at, die
from support.desk import OPERATOR, Clock, Desk, aggregate_until_idle, fedavg_plan, put
from support.plans import update_body

from server.core.errors import Conflict, Gone, NotAllowed
from server.service import client_tokens, clients, deadlines, enrollment, federations, invites
from server.service.aggregation import LEASE_S, Aggregator
from server.service.cleaning import Cleaner
from server.service.context import Context, Identity
from server.service.heartbeats import Heartbeats
from server.service.retention import Retention
from server.service.uploads.resumable import UploadPart, status
from server.service.uploads.single_request import SingleRequestUpload
from server.store.database import Database
from server.store.tables import Federation, Participant, Round
from shared.contract.messages import JoinRequest, StatusReport, UpdateReceipt
from shared.contract.plan import FederationPlan
from shared.tensors.wire import digest

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
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Site:
    """A site, and whether it is still a client."""

    name: str
    token: str
    active: bool = True


@dataclass
class Process:
    """A coordinator process: its worker and the PUTs it is receiving."""

    ctx: Context
    worker: Aggregator = field(init=False)
    puts: list[tuple[SingleRequestUpload, bytes, tuple[int, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = Aggregator(self.ctx)


class World:
    """A federation, two processes that serve it, four sites, and everything that may happen to them."""

    def __init__(self, new_database: Callable[[], Database]) -> None:
        self.db, self.clock = new_database(), Clock()
        self.processes = [Process(Context(self.db, self.clock)) for _ in range(2)]
        self.sites: list[Site] = []
        self.accepted: dict[tuple[int, str], tuple[UpdateReceipt, bytes]] = {}  # by round and client
        self.parts: dict[tuple[int, str], int] = {}  # bytes of resumable uploads
        self.models: dict[int, str] = {}  # digests of published models already checked
        self.failed: set[int] = set()
        self.crashes = 0
        self.seeds = itertools.count()

    @property
    def ctx(self) -> Context:
        return self.processes[0].ctx

    plan: FederationPlan
    desk: Desk

    # Lookups in the database, never in the program's state.

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
            return client_tokens.authenticate(self.ctx, site.token)
        with pytest.raises(NotAllowed):
            client_tokens.authenticate(self.ctx, site.token)
        return None

    def takes_part(self, round_: Round, who: Identity) -> bool:
        with self.db.read() as session:
            return session.get(Participant, (round_.id, who.client_id)) is not None

    def next_body(self) -> bytes:
        return BODIES[next(self.seeds) % len(BODIES)]

    # Sites.

    def join(self, draw: Draw) -> None:
        self.enroll(draw(st.sampled_from(NAMES)))

    def enroll(self, name: str) -> None:
        if self.has_ended():
            with pytest.raises(Conflict, match=r"is (finished|cancelled)"):
                invites.create(self.ctx, OPERATOR, self.plan.name, 60)
            return
        token = invites.create(self.ctx, OPERATOR, self.plan.name, 60).token
        request = JoinRequest(name=name, class_counts={"cat": 1})
        if any(site.name == name and site.active for site in self.sites):
            with pytest.raises(Conflict, match="is already called"):
                enrollment.join(self.ctx, token, request)
        else:
            self.sites.append(Site(name, enrollment.join(self.ctx, token, request).token))

    def candidate(self, draw: Draw) -> tuple[Round, Identity] | None:
        """Return a site that may upload to the latest round."""
        return self.part_of(draw(st.sampled_from(self.sites))) if self.sites else None

    def part_of(self, site: Site) -> tuple[Round, Identity] | None:
        """Return the site's part in the latest round unless it has uploaded; others must be rejected."""
        round_ = self.latest_round()
        if round_ is None:
            return None
        who = self.authenticate(site)
        if who is None or (round_.id, who.client_id) in self.accepted:
            return None
        if self.takes_part(round_, who):
            return round_, who
        with pytest.raises(NotAllowed, match="was not chosen"):
            SingleRequestUpload(self.ctx, who, round_.id, None, None)
        return None

    def upload(self, draw: Draw) -> None:
        self.put(self.candidate(draw), self.process(draw))

    def put(self, part: tuple[Round, Identity] | None, process: Process) -> None:
        if part is None:
            return
        (round_, who), body = part, self.next_body()
        if round_.state != "open":
            with pytest.raises(Gone, match="accepts no more updates"):
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
            with pytest.raises(Conflict, match="was already accepted"):
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
        """Send all bytes of a PUT, but not its end."""
        found, process, body = self.candidate(draw), self.process(draw), self.next_body()
        if found is not None and found[0].state == "open":
            round_, who = found
            upload = SingleRequestUpload(process.ctx, who, round_.id, None, len(body))
            upload.feed(body)
            self.parts.pop((round_.id, who.client_id), None)
            process.puts.append((upload, body, (round_.id, who.client_id)))

    def end_put(self, draw: Draw) -> None:
        """End a PUT that started some steps ago: accepted, overtaken by events, or interrupted."""
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
        if key in self.accepted:  # another request of this site came first
            assert self.accepted[key][0] == receipt
        else:
            self.accept(key[0], self.identity(key[1]), receipt, body)

    def leave(self, draw: Draw) -> None:
        present = [site for site in self.sites if site.active]
        if present:
            site = draw(st.sampled_from(present))
            clients.leave(self.ctx, client_tokens.authenticate(self.ctx, site.token), OPERATOR)
            site.active = False

    def revoke(self, draw: Draw) -> None:
        if self.sites:
            name = draw(st.sampled_from(self.sites)).name
            clients.revoke(self.ctx, OPERATOR, self.plan.name, name)
            for site in self.sites:
                site.active &= site.name != name

    # The operator.

    def pause(self, _draw: Draw) -> None:
        self.operate(federations.pause)

    def resume(self, _draw: Draw) -> None:
        self.operate(federations.resume)

    def operate(self, action: Callable[..., None]) -> None:
        if self.has_ended():
            with pytest.raises(Conflict, match=r"cannot be|can no longer be"):
                action(self.ctx, OPERATOR, self.plan.name)
        else:
            action(self.ctx, OPERATOR, self.plan.name)

    def cancel(self, draw: Draw) -> None:
        if draw(st.sampled_from(range(12))) == 11 and not self.has_ended():  # rare, because nothing happens afterwards
            federations.cancel(self.ctx, OPERATOR, self.plan.name)

    # Time, work and crashes.

    def time_passes(self, draw: Draw) -> None:
        self.desk.wait(draw(SECONDS))
        deadlines.enforce_deadlines(self.process(draw).ctx)

    def somebody_falls_silent(self, draw: Draw) -> None:
        """Let time pass while some agents report, some poll and some are dead; the dead may still upload later."""
        beats, active = Heartbeats(), [site for site in self.sites if site.active]
        for site in draw(st.lists(st.sampled_from(active), max_size=4)) if active else []:
            who = client_tokens.authenticate(self.ctx, site.token)
            if draw(st.booleans()):
                beats.note_report(who.client_id, self.clock(), StatusReport(activity="training"))
            else:
                beats.note(who.client_id, self.clock(), can_report=draw(st.booleans()))
        beats.flush(self.process(draw).ctx)
        self.desk.polling = False
        self.desk.wait(draw(SECONDS))
        self.desk.polling = True
        deadlines.enforce_deadlines(self.process(draw).ctx)

    def time_passes_unnoticed(self, draw: Draw) -> None:
        self.desk.wait(draw(SECONDS))

    def clock_jumps(self, draw: Draw) -> None:
        """Set the machine's clock, which must have no effect."""
        self.clock.jump(draw(st.sampled_from([-86400.0, 86400.0])))

    def work_a_step(self, draw: Draw) -> None:
        self.process(draw).worker.step()

    def work(self, draw: Draw) -> None:
        aggregate_until_idle(self.process(draw).worker)

    def crash(self, draw: Draw) -> None:
        """Kill a process at some stage of its work, or while it is idle, and start another."""
        place, stage = draw(st.sampled_from([0, 1])), draw(st.sampled_from(STAGES))

        try:
            aggregate_until_idle(InterruptibleAggregator(self.processes[place].ctx, at(stage, die)))
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
