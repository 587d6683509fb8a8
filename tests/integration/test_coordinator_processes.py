"""Coordinator processes that share a database, get killed, and serve many sites at once."""

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
from support.databases import migrate, new_postgres_database
from support.desk import OPERATOR, mean_bits
from support.plans import small_plan, update_body
from support.waiting import eventually

from server.service import enrollment, federations, invites
from server.service.context import Context
from server.store.database import Database
from server.store.tables import Client, CoordinatorClock, Round
from shared.contract.messages import JoinRequest
from shared.contract.plan import FederationPlan
from shared.tensors.names import SHARED, strip_prefix
from shared.tensors.wire import digest, digest_header, encode

FEDAVG = {"name": "fedavg"}


def expected_mean(plan: FederationPlan, seeds: list[int]) -> str:
    return mean_bits([update_body(plan, {}, seed) for seed in seeds])


def published_mean(site: Site, number: int) -> str:
    return digest(encode(site.tensors(f"/v1/federations/{site.plan.name}/model?round={number}")))


def test_two_processes_see_the_last_two_uploads_at_the_same_moment(postgres_url: str, tmp_path: Path) -> None:
    """Fifty rounds, each closed by two uploads that race on two processes: each is aggregated once, from both.

    Five federations have ten rounds each at the same time, because most of a round's time is waiting.
    """
    url = new_postgres_database(postgres_url)
    migrate(url)
    with ExitStack() as stack:
        processes = [stack.enter_context(running(url, tmp_path, forked=True)) for _ in range(2)]
        pool = stack.enter_context(ThreadPoolExecutor(5))
        assert list(pool.map(lambda number: race(*processes, number, rounds=10), range(5))) == [10] * 5


def race(first: CoordinatorProcess, second: CoordinatorProcess, federation: int, rounds: int) -> int:
    """Run a federation to its end; return how many rounds had the right result."""
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
            left.wait_for_model(number)
    right.wait_until_finished()
    history = first.admin("GET", f"/v1/federations/{plan.name}/rounds")
    assert [(row["number"], row["state"], row["updates"]) for row in history] == [
        (number, "done", 2) for number in range(1, rounds + 1)
    ]
    return sum(
        published_mean(left, number) == expected_mean(plan, [2 * number, 2 * number + 1])
        for number in range(1, rounds + 1)
    )


def enrolled(db_url: str, plan: FederationPlan, *names: str) -> list[str]:
    """Create and start a federation; return the tokens of its sites."""
    db = Database(db_url)
    ctx = Context(db)
    federations.create(ctx, OPERATOR, plan)
    federations.start(ctx, OPERATOR, plan.name)
    tickets = [invites.create(ctx, OPERATOR, plan.name, 60).token for _ in names]
    requests = [JoinRequest(name=name, class_counts={"cat": 1}) for name in names]
    tokens = [enrollment.join(ctx, *pair).token for pair in zip(tickets, requests, strict=True)]
    db.close()
    return tokens


def let_the_lease_run_out(db_url: str) -> None:
    """Expire the lease of the dead process, as ten seconds would."""
    db = Database(db_url)
    with db.write() as session:
        session.execute(update(Round).values(lease_until=-1))
    db.close()


def test_killed_after_every_upload_it_continues_where_it_was(db_url: str, tmp_path: Path) -> None:
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
        site.wait_until_finished()
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
        sites[0].wait_until_finished()
        assert published_mean(sites[1], 1) == expected_mean(plan, list(range(40)))
        lines = [line for process in processes for line in process.lines]
        assert not [line for line in lines if "locked" in line or "Traceback" in line]


def test_endless_uploads_do_not_delay_heartbeats_and_deadlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sites keep uploading to one process: it still records heartbeats and counts its uptime."""
    monkeypatch.setenv("DISTRANS_REQUESTS_PER_S", "0")
    plan = small_plan(method=FEDAVG, image={"height": 32, "width": 32}, rounds={"count": 1, "min_clients": 9})
    url = f"sqlite:///{tmp_path / 'coordinator.db'}"
    with running(url, tmp_path, forked=True) as coordinator, ThreadPoolExecutor(8) as pool:
        coordinator.create(plan)
        waiting, *busy = [coordinator.join(plan, f"site-{number}", {"cat": 1}) for number in range(9)]
        round_id, body, enough = waiting.task().round.id, update_body(plan, {}, 1), Event()

        def upload(site: Site) -> set[int]:
            """Send bodies that turn out wrong at their end: each is written and deleted again."""
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
    """Return when the first site was last seen, and the coordinator's uptime, as stored."""
    with db.read() as session:
        seen = session.execute(select(Client.last_seen_at).where(Client.name == "site-0")).scalar_one()
        return seen, session.execute(select(CoordinatorClock.uptime)).scalar_one()


def peak_memory_kb(coordinator: CoordinatorProcess) -> int:
    status = Path(f"/proc/{coordinator.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def run_large_round(coordinator: CoordinatorProcess, name: str, clients: int) -> int:
    """Run a federation of one round with updates of 2 MB; return the size of an update."""
    plan = small_plan(
        name,
        method=FEDAVG,
        image={"channels": 3, "height": 48, "width": 48},
        rounds={"count": 1, "min_clients": clients},
    )
    coordinator.create(plan)
    sites = [coordinator.join(plan, f"site-{number}", {"cat": 1}) for number in range(clients)]
    body = update_body(plan, {}, 1)
    round_id = sites[0].task().round.id
    for site in sites:
        assert site.put(round_id, body).status_code == 200
    sites[0].wait_until_finished()
    mean = sites[0].tensors(f"/v1/federations/{name}/model?round=1")
    sent = strip_prefix(safetensors.torch.load(body), SHARED)
    assert all(mean[name].equal(value) for name, value in sent.items())
    return len(body)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from Linux's /proc")
def test_peak_memory_of_a_round_does_not_grow_with_the_number_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty more clients of 2 MB each stay within a tenth of the peak; kept in memory, they would exceed it.

    The first two rounds have the same size, so that threads and connections exist before the comparison. With a single
    arena and a low mmap threshold, malloc returns freed tensors to the system instead of keeping some for each thread.
    """
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    peaks = {}
    with running(f"sqlite:///{tmp_path / 'coordinator.db'}", tmp_path) as coordinator:
        for name, clients in (("warm-up", 10), ("small", 10), ("large", 60)):
            update_bytes = run_large_round(coordinator, name, clients)
            peaks[name] = peak_memory_kb(coordinator)
    assert 50 * update_bytes > 0.1 * peaks["small"] * 1024  # else this test could not fail
    assert peaks["large"] < 1.1 * peaks["small"], peaks
