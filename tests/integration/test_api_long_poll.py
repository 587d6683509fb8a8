"""Long polls: what wakes an agent, how many agents can wait, and how the process stops."""

import asyncio
import json
import resource
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.api import SocketApi, problem_of
from support.coordinator import ADMIN_TOKEN, CoordinatorProcess, Site, running
from support.databases import KINDS, new_database
from support.desk import count
from support.plans import small_plan, update_body
from support.sockets import RawConnection
from support.waiting import eventually

from server.service import clients, federations, tasks
from server.service.context import Actor, Context, Identity
from server.store.database import Database
from server.store.tables import Transfer, Update
from shared.contract.messages import TaskAnswer
from shared.contract.plan import FederationPlan
from shared.tensors.wire import digest

AGENTS = 1000
OPERATOR = Actor("operator:test")


@pytest.fixture(scope="module", autouse=True)
def _many_open_files() -> Iterator[None]:
    """Raise the limit on open files: connections need them, here and in child processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, min(hard, 4 * AGENTS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module", params=KINDS)
def db_address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_database(request.param, request, tmp_path_factory.mktemp("long-poll"))


@pytest.fixture(scope="module")
def coordinator(db_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """Run one process; each test creates its own federation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTRANS_POLLS_PER_CLIENT", "0")  # the thousand agents share one token
        with running(db_address, tmp_path_factory.mktemp("data"), forked=True) as process:
            yield process


@pytest.fixture(scope="module")
def elsewhere(db_address: str) -> Iterator[Context]:
    """Return a second coordinator, in this process, which shares only the database with the first."""
    db = Database(db_address)
    yield Context(db)
    db.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def new_federation(coordinator: CoordinatorProcess, name: str, **rounds: Any) -> tuple[FederationPlan, Site]:
    """Create a federation with one site, and do not start it."""
    plan = small_plan(name, method={"name": "fedavg"}, rounds=rounds)
    coordinator.create(plan, start=False)
    return plan, coordinator.join(plan, "north", {"cat": 1})


def last_seen(site: Site) -> float:
    return float(site.http.get("/v1/me", headers=site.headers).json()["last_seen_at"])


def poll_all(pool: ThreadPoolExecutor, sites: list[Site], after: str = "") -> "list[Future[TaskAnswer]]":
    """Start long polls, and wait until their heartbeats are in the database."""
    before = [last_seen(site) for site in sites]
    waiting = [pool.submit(site.task, 60, after) for site in sites]
    eventually(lambda: all(last_seen(site) > then for site, then in zip(sites, before, strict=True)))
    assert not any(answer.done() for answer in waiting)
    return waiting


def poll(pool: ThreadPoolExecutor, site: Site, after: str = "") -> "Future[TaskAnswer]":
    """Start one long poll."""
    return poll_all(pool, [site], after)[0]


class TestWaking:
    def test_work_is_returned_at_once(self, coordinator: CoordinatorProcess) -> None:
        plan, site = new_federation(coordinator, "at-once", deadline_s=600)
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        answer = site.http.get("/v1/task?wait=60", headers=site.headers, timeout=50)
        task = TaskAnswer.model_validate(answer.json())
        assert task.action == "train"
        assert task.round is not None
        assert task.round.number == 1
        assert task.round.update_url == f"/v1/rounds/{task.round.id}/update"
        assert task.personal_url == f"/v1/rounds/{task.round.id}/personal"
        assert task.model is not None
        assert task.model.number == 0
        assert task.deadline_s is not None
        assert 0 < task.deadline_s <= 600

    def test_an_opening_round_wakes_its_site(self, coordinator: CoordinatorProcess, pool: ThreadPoolExecutor) -> None:
        plan, site = new_federation(coordinator, "opens")
        waiting = poll(pool, site)
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        assert waiting.result(50).action == "train"

    def test_the_last_missing_site_wakes_the_others(
        self, coordinator: CoordinatorProcess, pool: ThreadPoolExecutor
    ) -> None:
        plan, site = new_federation(coordinator, "joins", min_clients=2)
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        waiting = poll(pool, site)
        coordinator.join(plan, "south", {"dog": 1})
        assert waiting.result(50).action == "train"

    def test_a_change_by_another_process_wakes_a_site(
        self, coordinator: CoordinatorProcess, elsewhere: Context, pool: ThreadPoolExecutor
    ) -> None:
        plan, site = new_federation(coordinator, "elsewhere")
        waiting = poll(pool, site)
        federations.start(elsewhere, OPERATOR, plan.name)
        task = waiting.result(50)
        assert task.action == "train"
        assert task.round is not None
        body = update_body(plan, {}, 1)
        assert site.put(task.round.id, body).status_code == 200
        after = site.task(0).ticket
        while (task := site.task(60, after)).action != "train":
            after = task.ticket
        federations.pause(elsewhere, OPERATOR, plan.name, "tea")
        paused = site.task(60, task.ticket)
        assert (paused.action, paused.reason, paused.round) == ("paused", "tea", None)
        waiting = poll(pool, site, after=paused.ticket)
        federations.cancel(elsewhere, OPERATOR, plan.name)
        assert waiting.result(50).action == "cancelled"

    def test_a_change_wakes_every_site_of_the_federation(
        self, coordinator: CoordinatorProcess, pool: ThreadPoolExecutor
    ) -> None:
        plan, north = new_federation(coordinator, "all", min_clients=3)
        sites = [north, *(coordinator.join(plan, name, {"cat": 1}) for name in ("east", "south"))]
        waiting = poll_all(pool, sites)
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        assert [answer.result(50).action for answer in waiting] == ["train"] * 3

    def test_the_end_of_a_federation_wakes_its_sites(
        self, coordinator: CoordinatorProcess, pool: ThreadPoolExecutor
    ) -> None:
        """The site that uploaded first waits for the others, then learns that this was the last round."""
        plan, north = new_federation(coordinator, "ends", min_clients=2, count=1)
        south = coordinator.join(plan, "south", {"dog": 1})
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        task = north.task()
        assert task.round is not None
        assert north.put(task.round.id, update_body(plan, {}, 1)).status_code == 200
        waiting = poll(pool, north)
        assert south.put(task.round.id, update_body(plan, {}, 2)).status_code == 200
        finished = waiting.result(50)
        assert (finished.action, finished.reason) == ("finished", "all 1 rounds are done")
        assert finished.model is not None
        assert finished.model.number == 1
        assert north.task(60).action == "finished"  # at once, for a site without a ticket


def test_a_revoked_site_is_told_at_once(
    coordinator: CoordinatorProcess, elsewhere: Context, pool: ThreadPoolExecutor
) -> None:
    """Not at the end of its poll, and whichever process the operator uses. The others keep waiting."""
    plan, revoked = new_federation(coordinator, "access")
    rotated, leaving, staying = (coordinator.join(plan, name, {"cat": 1}) for name in ("south", "east", "west"))
    waiting = poll_all(pool, [revoked, rotated, leaving, staying])
    clients.revoke(elsewhere, OPERATOR, plan.name, "north")
    coordinator.admin("POST", f"/v1/federations/{plan.name}/clients/south/rotate")
    assert leaving.http.delete("/v1/me", headers=leaving.headers).status_code == 204
    for answer, code in zip(waiting, ("client-revoked", "invalid-token", "client-left"), strict=False):
        with pytest.raises(AssertionError, match=f'"code":"{code}"'):
            answer.result(50)
    assert not waiting[3].done()
    coordinator.admin("POST", f"/v1/federations/{plan.name}/cancel")
    assert waiting[3].result(50).action == "cancelled"


class TestTickets:
    def test_without_a_change_the_poll_lasts_until_its_timeout(self, coordinator: CoordinatorProcess) -> None:
        _, site = new_federation(coordinator, "nothing-new")
        answers = [site.task(wait_s) for wait_s in (0, 0.1, 1)]
        assert {(answer.action, answer.reason) for answer in answers} == {("wait", "the operator has not started it")}
        (ticket,) = {answer.ticket for answer in answers}
        assert site.task(0.1, after=ticket) == answers[0]

    def test_an_outdated_ticket_is_answered_at_once(self, coordinator: CoordinatorProcess) -> None:
        plan, site = new_federation(coordinator, "tickets")
        first = site.task(0)
        assert site.http.get("/v1/task?wait=60&after=old", headers=site.headers, timeout=50).json()["action"] == "wait"
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        train = site.task(60, after=first.ticket)
        assert train.ticket != first.ticket
        again = site.http.get(f"/v1/task?wait=60&after={train.ticket}", headers=site.headers, timeout=50).json()
        assert (again["action"], again["ticket"]) == ("train", train.ticket)  # work is returned at once
        assert train.round is not None
        assert site.put(train.round.id, update_body(plan, {}, 1)).status_code == 200
        assert site.task(60, after=train.ticket).ticket != train.ticket

    def test_site_that_follows_tickets_misses_no_step(self, coordinator: CoordinatorProcess) -> None:
        """Started, uploaded, aggregated, finished."""
        plan, site = new_federation(coordinator, "steps", count=2)
        seen = [site.task(0)]
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        while seen[-1].action != "finished":
            task = site.task(60, after=seen[-1].ticket)
            seen.append(task)
            if task.round is not None:
                assert site.put(task.round.id, update_body(plan, {}, task.round.number)).status_code == 200
        assert all(before.ticket != after.ticket for before, after in pairwise(seen))
        models = [task.model.number for task in seen if task.model is not None]
        assert models == sorted(models)
        assert [task.action for task in seen].count("train") == 2
        assert site.task(0.1, after=seen[-1].ticket) == seen[-1]

    @pytest.mark.parametrize("query", ["wait=-1", "wait=61", "wait=soon", "wait=nan", "after=" + "x" * 65])
    def test_parameters_out_of_range_are_refused(self, coordinator: CoordinatorProcess, query: str) -> None:
        plan = small_plan(f"range-{digest(query.encode())[:8]}", method={"name": "fedavg"})
        coordinator.create(plan, start=False)
        site = coordinator.join(plan, "north", {"cat": 1})
        answer = site.http.get(f"/v1/task?{query}", headers=site.headers)
        assert problem_of(answer) == (422, "invalid-request")
        assert answer.json()["errors"][0].startswith("query." + query.partition("=")[0])


async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> dict[str, Any]:
    """Poll on one connection until there is work."""
    request = f"GET /v1/task?wait=60 HTTP/1.1\r\nHost: coordinator\r\nAuthorization: Bearer {token}\r\n\r\n"
    answer: dict[str, Any] = {}
    try:
        while answer.get("action") != "train":
            writer.write(request.encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert head.startswith("http/1.1 200 "), head
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            answer = json.loads(await reader.readexactly(length))
        return answer
    finally:
        writer.close()
        await writer.wait_closed()


def thread_count(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])


def open_files(process_id: int) -> int:
    return len(list(Path(f"/proc/{process_id}/fd").iterdir()))


async def crowd(coordinator: CoordinatorProcess, plan: FederationPlan, site: Site) -> tuple[list[dict[str, Any]], int]:
    """Let all agents wait, then open the round; return their tasks and the number of threads meanwhile."""
    parts, process_id = urlsplit(coordinator.url), coordinator.process.pid
    before = open_files(process_id)
    agents = []
    for _ in range(AGENTS):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        agents.append(asyncio.create_task(agent(reader, writer, site.token)))
    await asyncio.to_thread(eventually, lambda: open_files(process_id) >= before + AGENTS)
    # Calls that need a thread queue up behind the agents' calls: after two rounds of these, every agent is waiting.
    for _ in range(2):
        await asyncio.to_thread(last_seen, site)
    threads = thread_count(process_id)
    assert not any(task.done() for task in agents)
    await asyncio.to_thread(coordinator.admin, "POST", f"/v1/federations/{plan.name}/start")
    answers = []
    for answer in asyncio.as_completed(agents, timeout=100):
        answers.append(await answer)
        threads = max(threads, thread_count(process_id))
    return answers, threads


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("db_address", ["sqlite"], indirect=True)
def test_a_thousand_agents_wait_without_a_thread_each(coordinator: CoordinatorProcess) -> None:
    plan, site = new_federation(coordinator, "crowd", deadline_s=3600)
    answers, threads = asyncio.run(crowd(coordinator, plan, site))
    assert len(answers) == AGENTS
    assert {(answer["action"], answer["round"]["number"]) for answer in answers} == {("train", 1)}
    assert threads < 100


@pytest.mark.parametrize("empty_db_url", ["sqlite"], indirect=True)
def test_stopping_answers_open_polls_without_the_database(db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand reads of a busy database would outlast the grace period, and the rest would be cut off."""
    looks: list[object] = []

    def counted(ctx: Context, identities: Sequence[Identity]) -> Sequence[object]:
        found = answers(ctx, identities)
        looks.extend(found)
        return found

    def counted_alone(ctx: Context, identity: Identity) -> tasks.Told | None:
        if (found := answer_at_once(ctx, identity)) is not None:
            looks.append(found)
        return found

    answers, answer_at_once = tasks.answers, tasks.answer_at_once
    monkeypatch.setattr(tasks, "answers", counted)
    monkeypatch.setattr(tasks, "answer_at_once", counted_alone)
    with ExitStack() as stack:
        with SocketApi(db_url, polls_per_client=0) as api:
            api.create(plan := small_plan("stopping", method={"name": "fedavg"}))
            site = api.join(plan, "north", {"cat": 1})
            waiting = [stack.enter_context(RawConnection(api.url)) for _ in range(100)]
            for connection in waiting:
                connection.send_head("GET", "/v1/task?wait=60", Authorization=f"Bearer {site.token}")
            eventually(lambda: len(looks) == len(waiting))
        assert [connection.answer()[0] for connection in waiting] == [200] * len(waiting)
    assert len(looks) == len(waiting)


@pytest.mark.parametrize("empty_db_url", ["postgresql"], indirect=True)
def test_sigterm_answers_open_polls_and_finishes_uploads(db_url: str, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """The process then exits with 0."""
    db = Database(db_url)
    ctx = Context(db)
    with running(db_url, tmp_path) as coordinator:
        waiting_plan, north = new_federation(coordinator, "waiting")
        sites = [north, coordinator.join(waiting_plan, "south", {"dog": 1})]
        plan, uploader = new_federation(coordinator, "uploading", min_clients=1)
        coordinator.admin("POST", f"/v1/federations/{plan.name}/start")
        task = uploader.task()
        assert task.round is not None
        body = update_body(plan, {}, 1)
        with RawConnection(coordinator.url) as connection:
            path = f"/v1/rounds/{task.round.id}/update"
            connection.send_head("PUT", path, **uploader.headers, Content_Length=len(body))
            connection.send(body[:1000])
            eventually(lambda: count(ctx.db, Transfer) == [1])
            waiting = poll_all(pool, sites)
            coordinator.process.send_signal(signal.SIGTERM)
            assert [answer.result(50).action for answer in waiting] == ["wait", "wait"]
            assert coordinator.process.poll() is None
            connection.send(body[1000:])
            status, answer = connection.answer()
        assert (status, json.loads(answer)["digest"]) == (200, digest(body))
        assert coordinator.wait() == 0
    assert count(ctx.db, Transfer, Update) == [0, 1]
    assert not [line for line in coordinator.lines if "ERROR" in line or "Traceback" in line]
    assert ADMIN_TOKEN not in "\n".join(coordinator.lines)
    db.close()
