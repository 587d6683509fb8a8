"""Coordinator processes that share a database, are killed, and are used by many sites at once."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Event

import pytest
import safetensors.torch
from sqlalchemy import select, update
from support.api import open_api
from support.coordinator import CoordinatorProcess, Site, running
from support.databases import new_postgres_database
from support.plans import small_plan, update_body, update_tensors
from support.service import OPERATOR
from support.waiting import eventually

from server.core.aggregation import strip
from server.service import enrolment, federations
from server.service.context import Context
from server.store.schema import upgrade
from server.store.session import Database
from server.store.tables import Client, CoordinatorClock, Round
from shared.methods.base import SHARED
from shared.plan import FederationPlan
from shared.schemas import JoinRequest
from shared.summation import RunningMean
from shared.wire import digest, digest_header, encode

FEDAVG = {"name": "fedavg"}


def wait_for_model(site: Site, number: int) -> None:
    """Follow the long poll until the coordinator has published this model."""
    task = site.task(after="none")
    while task.model is None or task.model.number < number:
        assert task.action in ("train", "wait"), task
        task = site.task(after=task.ticket)


def expected_mean(plan: FederationPlan, seeds: list[int]) -> str:
    mean = RunningMean()
    for seed in seeds:
        mean.add(strip(update_tensors(plan, {}, seed), SHARED))
    return digest(encode(mean.result()))


def published_mean(site: Site, number: int) -> str:
    return digest(encode(site.tensors(f"/v1/federations/{site.plan.name}/model?round={number}")))


def test_two_processes_see_the_last_two_uploads_at_the_same_moment(postgres_url: str, tmp_path: Path) -> None:
    """Fifty rounds, each closed by two uploads that race on two processes: each is aggregated once, from both.

    Five federations have ten rounds each at the same time, because most of a round's time is waiting.
    """
    url = new_postgres_database(postgres_url)
    db = Database(url)
    upgrade(db)
    db.close()
    with ExitStack() as stack:
        processes = [stack.enter_context(running(url, tmp_path, forked=True)) for _ in range(2)]
        pool = stack.enter_context(ThreadPoolExecutor(5))
        assert list(pool.map(lambda number: race(*processes, number, rounds=10), range(5))) == [10] * 5


def race(first: CoordinatorProcess, second: CoordinatorProcess, federation: int, rounds: int) -> int:
    """A federation to its end; how many rounds had the right result."""
    plan = small_plan(f"race-{federation}", method=FEDAVG, rounds={"count": rounds, "min_clients": 2})
    first.create(plan)
    left = first.join(plan, "left", {"cat": 1})
    right = Site(second.http, plan, "right", first.join(plan, "right", {"dog": 1}).token)
    for number in range(1, rounds + 1):
        task = left.task()
        assert task.round is not None
        assert task.round.number == number
        barrier = Barrier(2)

        def upload(site: Site, seed: int, round_id: int = task.round.id, barrier: Barrier = barrier) -> int:
            body = update_body(plan, {}, seed)
            barrier.wait()
            return site.put(round_id, body).status_code

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(upload, (left, right), (2 * number, 2 * number + 1))) == [200, 200]
        if number < rounds:
            wait_for_model(left, number)
    follow_to_the_end(right)
    history = first.admin("GET", f"/v1/federations/{plan.name}/rounds")
    assert [(row["number"], row["state"], row["updates"]) for row in history] == [
        (number, "done", 2) for number in range(1, rounds + 1)
    ]
    return sum(
        published_mean(left, number) == expected_mean(plan, [2 * number, 2 * number + 1])
        for number in range(1, rounds + 1)
    )


def enrolled(db_url: str, plan: FederationPlan, *names: str) -> list[str]:
    """The tokens of sites of a new federation that has started."""
    db = Database(db_url)
    ctx = Context(db)
    federations.create(ctx, OPERATOR, plan)
    federations.start(ctx, OPERATOR, plan.name)
    invites = [enrolment.invite(ctx, OPERATOR, plan.name, 60).token for _ in names]
    requests = [JoinRequest(name=name, class_counts={"cat": 1}) for name in names]
    tokens = [enrolment.join(ctx, *pair).token for pair in zip(invites, requests, strict=True)]
    db.close()
    return tokens


def let_the_lease_run_out(db_url: str) -> None:
    """What ten seconds would do to the lease that the dead process held."""
    db = Database(db_url)
    with db.write() as session:
        session.execute(update(Round).values(lease_until=-1))
    db.close()


def follow_to_the_end(site: Site) -> None:
    """Follow the long poll until the federation has finished."""
    after = ""
    while (task := site.task(after=after)).action != "finished":
        after = task.ticket


def test_killed_after_every_upload_it_goes_on_where_it_was(db_url: str, tmp_path: Path) -> None:
    plan = small_plan(method=FEDAVG, rounds={"count": 1, "min_clients": 2})
    tokens = enrolled(db_url, plan, "left", "right")
    for place, token in enumerate(tokens):
        with running(db_url, tmp_path, forked=True) as coordinator:
            site = Site(coordinator.http, plan, f"site {place}", token)
            task = site.task()
            assert task.round is not None
            assert site.put(task.round.id, update_body(plan, {}, place)).status_code == 200
            coordinator.kill()
            let_the_lease_run_out(db_url)
    with open_api(db_url) as api:
        site = Site(api.http, plan, "left", tokens[0])
        follow_to_the_end(site)
        assert published_mean(site, 1) == expected_mean(plan, [0, 1])


def test_forty_sites_upload_at_once_to_two_processes_on_sqlite(tmp_path: Path) -> None:
    plan = small_plan(method=FEDAVG, image={"height": 32, "width": 32}, rounds={"count": 1, "min_clients": 40})
    url = f"sqlite:///{tmp_path / 'coordinator.db'}"
    with ExitStack() as stack:
        processes = [stack.enter_context(running(url, tmp_path, forked=True)) for _ in range(2)]
        pool = stack.enter_context(ThreadPoolExecutor(40))
        processes[0].create(plan)

        def join(number: int) -> Site:
            return processes[number % 2].join(plan, f"site-{number}", {"cat": 1})

        sites = list(pool.map(join, range(40)))
        round_id = sites[0].task().round.id
        bodies = [update_body(plan, {}, number) for number in range(40)]
        barrier = Barrier(40)

        def upload(number: int) -> int:
            barrier.wait()
            return sites[number].put(round_id, bodies[number]).status_code

        assert list(pool.map(upload, range(40))) == [200] * 40
        follow_to_the_end(sites[0])
        assert published_mean(sites[1], 1) == expected_mean(plan, list(range(40)))
        lines = [line for process in processes for line in process.lines]
        assert not [line for line in lines if "locked" in line or "Traceback" in line]


def test_uploads_without_end_do_not_hold_up_heartbeats_and_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sites upload again and again to one process: it still notes who was seen, and counts its uptime."""
    monkeypatch.setenv("DISTRANS_REQUESTS_PER_S", "0")
    plan = small_plan(method=FEDAVG, image={"height": 32, "width": 32}, rounds={"count": 1, "min_clients": 9})
    url = f"sqlite:///{tmp_path / 'coordinator.db'}"
    with running(url, tmp_path, forked=True) as coordinator, ThreadPoolExecutor(8) as pool:
        coordinator.create(plan)
        waiting, *busy = [coordinator.join(plan, f"site-{number}", {"cat": 1}) for number in range(9)]
        round_id, body, enough = waiting.task().round.id, update_body(plan, {}, 1), Event()

        def upload(site: Site) -> set[int]:
            """Bodies that turn out to be wrong at their end are written and deleted, each time."""
            wrong = {"Content-Digest": digest_header("0" * 64)}
            answers = set()
            while not enough.is_set():
                answers.add(site.put(round_id, body, **wrong).status_code)
            return answers

        uploads = [pool.submit(upload, site) for site in busy]
        db = Database(url)
        try:
            seen, uptime = facts_in(db)
            waiting.task(0)
            eventually(lambda: facts_in(db)[0] > seen)
            eventually(lambda: facts_in(db)[1] > uptime)
        finally:
            enough.set()
            db.close()
        assert [answers.result() for answers in uploads] == [{422}] * 8
        assert not [line for line in coordinator.lines if "locked" in line or "Traceback" in line]


def facts_in(db: Database) -> tuple[float, float]:
    """When the first site was last seen, and how long the coordinator has been up, as the database has it."""
    with db.read() as session:
        seen = session.execute(select(Client.last_seen_at).where(Client.name == "site-0")).scalar_one()
        return seen, session.execute(select(CoordinatorClock.uptime)).scalar_one()


def peak_memory_kb(coordinator: CoordinatorProcess) -> int:
    status = Path(f"/proc/{coordinator.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from Linux's /proc")
def test_peak_memory_of_a_round_does_not_grow_with_the_number_of_clients(tmp_path: Path) -> None:
    """Seventeen more clients of 4 MB each do not cost seventeen more models; threads and allocators keep some."""
    peaks = {}
    with running(f"sqlite:///{tmp_path / 'coordinator.db'}", tmp_path, forked=True) as coordinator:
        for clients in (3, 20):
            plan = small_plan(
                f"of-{clients}",
                method=FEDAVG,
                image={"channels": 3, "height": 64, "width": 64},
                rounds={"count": 1, "min_clients": clients},
            )
            coordinator.create(plan)
            sites = [coordinator.join(plan, f"site-{number}", {"cat": 1}) for number in range(clients)]
            body = update_body(plan, {}, 1)
            round_id = sites[0].task().round.id
            for site in sites:
                assert site.put(round_id, body).status_code == 200
            after = ""
            while (task := sites[0].task(after=after)).action != "finished":
                after = task.ticket
            mean = safetensors.torch.load(coordinator.http.get(task.model.url, headers=sites[0].headers).content)
            sent = strip(safetensors.torch.load(body), SHARED)
            assert all(mean[name].equal(value) for name, value in sent.items())
            peaks[clients] = peak_memory_kb(coordinator)
    assert (peaks[20] - peaks[3]) * 1024 < 12 * len(body), peaks
