"""A greedy client on a real server does not affect the others."""

import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import update
from support.api import SocketApi, problem_of
from support.coordinator import Site
from support.plans import small_plan
from support.sockets import RawConnection

from server.service import method_calls
from server.service.measurements import history
from server.store import blobs
from server.store.tables import Model
from shared.contract.errors import PlanError
from shared.contract.plan import validate_plan

PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 1, "min_clients": 2})
SMALL_HYPERNETWORK = {"name": "pfedhn", "hidden": 8, "hidden_layers": 1}
POLL = "/v1/task?wait=60"
MODEL = "/v1/federations/pets/model"
METRICS = "/v1/federations/pets/metrics.csv"


def new_site(api: SocketApi, name: str = "north") -> Site:
    if name == "north":
        api.create(PLAN, start=False)
    return api.join(PLAN, name, {"cat": 1})


def get(api: SocketApi, path: str, site: Site) -> RawConnection:
    """Send a request without reading the response."""
    connection = RawConnection(api.url)
    connection.send_head("GET", path, **site.headers)
    return connection


def readable(sockets: list[socket.socket], wait_s: float = 0) -> list[socket.socket]:
    return select.select(sockets, [], [], wait_s)[0]


def test_a_clients_newer_poll_displaces_its_oldest(sqlite_url: str) -> None:
    """None is rejected: an agent must not be locked out by polls on connections it lost."""
    with SocketApi(sqlite_url, polls_per_client=2) as api, ExitStack() as stack:
        greedy, other = new_site(api), new_site(api, "south")
        patient = stack.enter_context(get(api, POLL, other))
        polls = [stack.enter_context(get(api, POLL, greedy)) for _ in range(30)]
        waiting = {poll.socket: poll for poll in polls}
        while len(waiting) > 2:
            for answered in readable(list(waiting), 60):
                status, body = waiting.pop(answered).answer()
                assert (status, json.loads(body)["action"]) == (200, "wait")
        assert greedy.http.get("/v1/me", headers=greedy.headers).status_code == 200
        assert readable([*waiting, patient.socket]) == []
        api.admin("POST", "/v1/federations/pets/start")
        for poll in (*waiting.values(), patient):
            status, body = poll.answer()
            assert (status, json.loads(body)["action"]) == (200, "train")


@pytest.fixture
def large_model(sqlite_url: str) -> Iterator[tuple[SocketApi, Site]]:
    """Create a site of a federation whose model exceeds a connection's buffers."""
    with SocketApi(sqlite_url, downloads_per_client=2) as api:
        site, db = new_site(api), api.app.state.ctx.db
        blob_id = blobs.store(db, os.urandom(24 << 20))
        with db.write() as session:
            session.execute(update(Model).values(blob_id=blob_id))
        yield api, site


def test_unread_downloads_of_one_client_are_limited(large_model: tuple[SocketApi, Site]) -> None:
    api, greedy = large_model
    other = new_site(api, "south")
    with get(api, MODEL, greedy) as first, get(api, MODEL, greedy) as second:
        assert len(readable([first.socket], 60) + readable([second.socket], 60)) == 2  # both have started
        third = greedy.http.get(MODEL, headers=greedy.headers)
        assert problem_of(third) == (429, "too-many-downloads")
        assert int(third.headers["retry-after"]) > 0
        assert greedy.http.head(MODEL, headers=greedy.headers).status_code == 200  # HEAD is not a download
        assert other.http.get(MODEL, headers=other.headers).status_code == 200
    while (again := greedy.http.get(MODEL, headers=greedy.headers)).status_code == 429:
        pass  # until the server notices that the connections are gone
    assert len(again.content) == 24 << 20


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator["Held"]:
    """Blocks reads of history until they are released."""
    held = Held()
    monkeypatch.setattr(history, "records", held.records)
    yield held
    held.go.set()


class Held:
    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Semaphore(0)
        self._records, self._lock, self._now, self.most = history.records, threading.Lock(), 0, 0

    def records(self, *arguments: Any) -> Any:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.begun.release()
        assert self.go.wait(60)
        with self._lock:
            self._now -= 1
        return self._records(*arguments)


def test_history_reads_of_one_client_are_limited(sqlite_url: str, held: Held) -> None:
    with SocketApi(sqlite_url, history_reads_per_client=1) as api:
        greedy = new_site(api)
        with get(api, METRICS, greedy) as first:
            assert held.begun.acquire(timeout=60)
            for path in (
                METRICS,
                "/v1/federations/pets/rounds",
                "/v1/federations/pets/heterogeneity",
                "/v1/federations/pets/clients",
                "/v1/federations/pets",
                "/v1/federations",
            ):
                answer = greedy.http.get(path, headers=greedy.headers)
                assert problem_of(answer) == (429, "too-many-history-reads"), path
                assert int(answer.headers["retry-after"]) > 0
            assert api.call("GET", "/v1/federations").status_code == 200  # the operator has separate slots
            held.go.set()
            assert first.socket.recv(12) == b"HTTP/1.1 200"
        while (again := greedy.http.get(METRICS, headers=greedy.headers)).status_code == 429:
            pass  # until the server notices that the first one is gone
        assert again.text.startswith("round,state,client,")


def test_history_reads_do_not_block_other_requests(sqlite_url: str, held: Held) -> None:
    """Sixty reads share two threads; the forty in the pool stay free for everything else."""
    with SocketApi(sqlite_url, history_reads_per_client=0) as api, ExitStack() as stack:
        site = new_site(api)
        reads = [stack.enter_context(get(api, METRICS, site)) for _ in range(60)]
        assert held.begun.acquire(timeout=60)
        assert held.begun.acquire(timeout=60)
        assert site.task(0).action == "wait"
        assert site.http.get("/v1/me", headers=site.headers).status_code == 200
        held.go.set()
        assert {read.socket.recv(12) for read in reads} == {b"HTTP/1.1 200"}
        assert held.most == 2


def test_a_plan_with_a_hundred_thousand_errors_gets_a_short_response(sqlite_url: str) -> None:
    plan = {"name": "pets", "classes": ["cat", "dog"], "image": {"mean": ["x"] * 95_000}}
    with SocketApi(sqlite_url) as api:
        answer = api.call("POST", "/v1/federations", json=plan)
        assert problem_of(answer) == (422, "invalid-request")
        assert len(answer.content) < 32 * 1024
        faults = answer.json()["errors"]
        assert (len(faults), faults[0].partition(":")[0]) == (101, "image.mean.0")
        assert faults[-1] == "and 94,900 more"
    with pytest.raises(PlanError) as caught:
        validate_plan(plan)
    lines = str(caught.value).splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("The plan has 95,000 errors:", 102, "  and 94,900 more")


def test_other_bodies_with_many_or_long_errors_get_a_short_response(sqlite_url: str) -> None:
    with SocketApi(sqlite_url) as api:
        site = new_site(api)
        for counts in ({f"class-{number}": -1 for number in range(50_000)}, {"x" * 1_000_000: -1}):
            answer = site.http.patch("/v1/me", json={"class_counts": counts}, headers=site.headers)
            assert problem_of(answer) == (422, "invalid-request")
            assert len(answer.content) < 64 * 1024


def test_changes_without_effect_are_not_recorded(sqlite_url: str) -> None:
    with SocketApi(sqlite_url, requests_per_s=0) as api:
        site = new_site(api)
        before = api.admin("GET", "/v1/audit?limit=1000")
        for _ in range(100):
            same = site.http.patch("/v1/me", json={"class_counts": {"cat": 1}}, headers=site.headers)
            assert same.status_code == 200
        assert api.admin("GET", "/v1/audit?limit=1000") == before


def test_private_state_is_loaded_once_and_does_not_block_other_requests(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a round opens, everybody asks for personal tensors, and their source may be gigabytes."""
    go, begun = threading.Event(), threading.Semaphore(0)
    load = method_calls.load_tensors

    def slow(*arguments: Any) -> Any:
        begun.release()
        assert go.wait(60)
        return load(*arguments)

    monkeypatch.setattr(method_calls, "load_tensors", slow)
    plan = small_plan("offsets", method=SMALL_HYPERNETWORK, rounds={"count": 1, "min_clients": 1})
    with SocketApi(sqlite_url, downloads_per_client=0) as api, ExitStack() as stack:
        api.create(plan)
        site = api.join(plan, "north", {"cat": 1})
        path = site.task(0).personal_url or ""
        asked = [stack.enter_context(get(api, path, site)) for _ in range(50)]
        assert begun.acquire(timeout=60)
        assert site.task(0).action == "train"
        go.set()
        assert {answer.answer()[0] for answer in asked} == {200}
    assert not begun.acquire(blocking=False), "a second load"
