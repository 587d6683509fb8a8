"""The coordinator's services without HTTP: an operator, sites, and a clock that only tests move."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import safetensors.torch
from sqlalchemy import exists, func, select, update
from support.halves import server_half
from support.plans import small_plan, update_body
from torch import Tensor

from server.core.errors import CoordinatorError
from server.service import client_tokens, deadlines, downloads, enrollment, federations, invites, queries
from server.service.aggregation import Aggregator
from server.service.context import Actor, Context, Identity, facts_of
from server.service.heartbeats import Heartbeats
from server.service.queries import round_under_way
from server.service.uploads import single_request
from server.service.uptime import UptimeCounter
from server.store import blobs
from server.store.database import Database
from server.store.tables import Base, Blob, Client, Federation, Model, Participant, Personal, Round, Transfer, Update
from shared.contract.measurements import EvaluationReport, PairedCounts
from shared.contract.messages import FederationView, JoinRequest, RoundSummary, UpdateReceipt
from shared.contract.plan import FederationPlan
from shared.tensors.mean import RunningMean
from shared.tensors.names import SHARED, strip_prefix
from shared.tensors.wire import digest, encode

OPERATOR = Actor("operator", "192.0.2.1")
FEDAVG = {"name": "fedavg"}
MEAN_OFFSETS = {"name": "distrans", "offset_aggregation": "mean"}  # fast, and keeps private server state
TINY_NETWORK = {
    "name": "distrans",
    "offset_aggregation": "network",
    "generator": {"width": 8, "hidden": 8, "inputs": "embedding+offset"},
}


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now, self._passed = now, 0.0

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        """Return the seconds that have passed, unaffected by jumps."""
        return self._passed

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self._passed += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator might."""
        self.now += seconds


def fedavg_plan(name: str = "pets", **rounds: Any) -> FederationPlan:
    """Return a tiny FedAvg plan of 5 rounds; `rounds` changes the plan's rounds table."""
    return small_plan(name, method=FEDAVG, rounds={"count": 5, **rounds})


@dataclass
class Desk:
    """One federation and the coordinator process that runs it."""

    db: Database
    plan: FederationPlan = field(default_factory=fedavg_plan)
    clock: Clock = field(default_factory=Clock)
    create: bool = True
    start: bool = True
    polling: bool = True  # all sites' agents keep asking for work

    def __post_init__(self) -> None:
        self.restart()
        if self.create:
            federations.create(self.ctx, OPERATOR, self.plan)
        if self.create and self.start:
            federations.start(self.ctx, OPERATOR, self.name)

    @property
    def name(self) -> str:
        """The name of the federation."""
        return self.plan.name

    @property
    def view(self) -> FederationView:
        """The federation as the operator sees it."""
        return federations.show(self.ctx, self.name)

    @property
    def round(self) -> RoundSummary:
        """The round under way; fails if there is none."""
        under_way = self.view.round
        assert under_way is not None, self.view
        return under_way

    def restart(self) -> None:
        """Replace the coordinator process with a new one."""
        self.ctx = Context(self.db, self.clock, self.clock.monotonic)
        self.uptime = UptimeCounter(self.ctx, longest_step_s=math.inf)
        self.uptime.count()

    def join(self, name: str, **class_counts: int) -> Identity:
        """Invite and enroll a site."""
        return client_tokens.authenticate(self.ctx, self.join_token(name, **class_counts))

    def join_token(self, name: str, **class_counts: int) -> str:
        """Invite and enroll a site; return its token."""
        invite = invites.create(self.ctx, OPERATOR, self.name, 3600).token
        request = JoinRequest(name=name, class_counts=class_counts or {"cat": 5, "dog": 5})
        token = enrollment.join(self.ctx, invite, request).token
        self.poll()
        return token

    def poll(self, *who: Identity) -> None:
        """Ask for work from these sites, or all if `polling`, so that they have seen the round under way."""
        if not who and not self.polling:
            return
        chosen = {site.client_id for site in who}
        query = (
            select(Participant.client_id, Participant.round_id)
            .join(Round, Round.id == Participant.round_id)
            .join(Federation, Federation.id == Round.federation_id)
            .where(Round.state == "open", Federation.state == "running", Participant.seen.is_(False))
        )
        beats = Heartbeats()
        with self.db.read() as session:
            for client_id, round_id in session.execute(query):
                if client_id in chosen or not who:
                    beats.note(client_id, self.clock(), round_id, can_report=False)
        beats.flush(self.ctx)
        self.hear(*who)

    def hear(self, *who: Identity) -> None:
        """Send heartbeats from these sites, or all if `polling`, as agents of an older release do."""
        active = select(Client.id).join(Federation).where(Client.state == "active", Federation.name == self.name)
        with self.db.read() as session:
            client_ids = [site.client_id for site in who] or list(session.execute(active).scalars())
        beats = Heartbeats()
        for client_id in client_ids if who or self.polling else ():
            beats.note(client_id, self.clock(), can_report=False)
        beats.flush(self.ctx)

    def body(self, seed: int) -> bytes:
        """Return a valid update for the round under way."""
        return _body(self.plan, tuple(sorted(facts_of(self._under_way().facts).items())), seed)

    def put(self, who: Identity, body: bytes, round_id: int | None = None) -> UpdateReceipt:
        """Upload an update in one piece, by default for the round under way."""
        return put(self.ctx, who, self._under_way().id if round_id is None else round_id, body)

    def _under_way(self) -> Round:
        with self.db.read() as session:
            found = round_under_way(session, queries.load_federation(session, self.name))
        assert found is not None
        return found

    def upload(self, who: Identity, seed: int) -> UpdateReceipt:
        """Upload a valid update for the round under way."""
        return self.put(who, self.body(seed))

    def aggregate(self) -> None:
        """Do all the work that is waiting for the background worker."""
        aggregate_until_idle(Aggregator(self.ctx))

    def run_round(self, who: Mapping[Identity, int]) -> None:
        """Upload updates with these seeds from these sites, then aggregate."""
        for site, seed in who.items():
            self.upload(site, seed)
        self.aggregate()

    def wait(self, seconds: float) -> None:
        """Let time pass while the coordinator is up, without enforcing deadlines."""
        self.poll()
        self.uptime.count()
        self.clock.advance(seconds)
        self.uptime.count()
        self.hear()

    def let_pass(self, seconds: float) -> None:
        """Let time pass, then enforce the deadlines that are due."""
        self.wait(seconds)
        deadlines.enforce_deadlines(self.ctx)

    def model(self, number: int | None = None) -> dict[str, Tensor]:
        """Return the tensors of a global model, the newest by default."""
        blob = downloads.federation_model(self.ctx, self.name, number)
        return safetensors.torch.load(blobs.read_all(self.db, blob.id))

    def bits(self, number: int | None = None) -> str:
        """Return the digest of a global model's tensors."""
        return digest(encode(self.model(number)))

    def rounds(self) -> list[Round]:
        """Return all rounds, oldest first."""
        query = select(Round).join(Federation, Federation.id == Round.federation_id)
        with self.db.read() as session:
            return list(session.execute(query.where(Federation.name == self.name).order_by(Round.number)).scalars())

    def models(self) -> list[Model]:
        """Return all models, oldest first."""
        query = select(Model).join(Federation, Federation.id == Model.federation_id)
        with self.db.read() as session:
            return list(session.execute(query.where(Federation.name == self.name).order_by(Model.number)).scalars())

    def private_bits(self, number: int | None = None) -> str | None:
        """Return the digest of the private server state stored with a model, the newest by default."""
        newest_first = reversed(self.models())
        blob_id = next(model.private_blob_id for model in newest_first if number in (None, model.number))
        return digest(blobs.read_all(self.db, blob_id)) if blob_id else None


@lru_cache(maxsize=256)
def _body(plan: FederationPlan, facts: tuple[tuple[str, str], ...], seed: int) -> bytes:
    return update_body(plan, dict(facts), seed)


def put(ctx: Context, who: Identity, round_id: int, body: bytes, *, claimed: str | None = None) -> UpdateReceipt:
    """Upload an update in one piece, as the API does; `claimed` is the Content-Digest."""
    upload = single_request.SingleRequestUpload(ctx, who, round_id, claimed, len(body))
    try:
        upload.feed(body)
        return upload.finish()
    except BaseException:
        upload.abandon()
        raise


def aggregate_until_idle(aggregator: Aggregator) -> None:
    """Run the aggregator until it has nothing left to do."""
    while aggregator.step():
        pass


def mean_bits(bodies: list[bytes]) -> str:
    """Return the digest of the plain mean of these updates."""
    mean = RunningMean()
    for body in bodies:
        mean.add(strip_prefix(safetensors.torch.load(body), SHARED))
    return digest(encode(mean.result()))


def count(db: Database, *tables: type[Base]) -> list[int]:
    """Return the number of rows in each table."""
    with db.read() as session:
        return [session.execute(select(func.count()).select_from(table)).scalar_one() for table in tables]


def unreferenced_blobs(db: Database) -> set[str]:
    """Return the ids of blobs that nothing refers to."""
    columns = (Model.blob_id, Model.private_blob_id, Update.blob_id, Transfer.blob_id, Personal.blob_id)
    with db.read() as session:
        query = select(Blob.id).where(*[~exists().where(column == Blob.id) for column in columns])
        return set(session.execute(query).scalars())


def update_limit(plan: FederationPlan) -> int:
    """Return the maximum size of an update for this plan, in bytes."""
    return server_half(plan).upload_spec({}).max_total_bytes


def refused(kind: type[CoordinatorError], code: str, step: Callable[[], object]) -> CoordinatorError:
    """Run the step, which must fail with this kind of error and code; return the error."""
    with pytest.raises(kind) as caught:
        step()
    assert caught.value.code == code
    return caught.value


def make_overdue(db: Database) -> None:
    """Let the deadline of every open round pass."""
    with db.write() as session:
        session.execute(update(Round).where(Round.state == "open").values(clock_started=True))
        session.execute(update(Federation).where(Federation.state == "running").values(due_uptime=-1.0))


def measured(correct: int, samples: int = 10, *, paired: PairedCounts | None = None) -> EvaluationReport:
    """Return an evaluation with this many correct answers."""
    return EvaluationReport(samples=samples, correct=correct, loss_sum=1.0, paired=paired)
