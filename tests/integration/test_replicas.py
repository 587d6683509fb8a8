"""Two replicas on one PostgreSQL behind one address, killed and restarted in turn under twenty sites."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import trustme
from support.coordinator import ADMIN_TOKEN, CoordinatorProcess, Site
from support.databases import migrate, new_postgres_database
from support.desk import mean_bits
from support.plans import small_plan, update_body
from support.reverse_proxy import PROXIES, reverse_proxy
from support.tls import trusting

from shared.tensors.wire import digest, encode

SITES, ROUNDS = 20, 4
PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": ROUNDS, "min_clients": SITES, "deadline_s": 600})
WAIT_S = 5.0


def persist(call: Callable[[], httpx.Response]) -> httpx.Response:
    """Retry like an agent, through broken connections and "try later" answers."""
    pause = threading.Event()
    while True:
        with suppress(httpx.TransportError):
            answer = call()
            if answer.status_code not in (429, 502, 503, 504):
                return answer
        pause.wait(0.2)


class SimulatedSite:
    """A site that follows its tasks to the end; its updates are determined by round and place."""

    def __init__(self, site: Site, place: int, stage: "Stage") -> None:
        self._site, self._place, self._stage = site, place, stage
        self.uploads: dict[int, int] = {}

    def run(self) -> None:
        ticket = "none"
        while True:
            params: dict[str, Any] = {"wait": WAIT_S, "after": ticket}
            task = self._get("/v1/task", params=params).json()
            ticket = task["ticket"]
            if task["action"] == "finished":
                return
            if task["action"] == "train":
                self._upload(task["round"])
                ticket = "none"

    def _get(self, path: str, **options: Any) -> httpx.Response:
        answer = persist(lambda: self._site.http.get(path, headers=self._site.headers, **options))
        assert answer.status_code == 200, answer.text
        return answer

    def _upload(self, round_: dict[str, Any]) -> None:
        self._stage.may_begin[round_["number"]].wait(120)
        body = update_body(PLAN, {}, seed_of(round_["number"], self._place))
        answer = persist(lambda: self._site.put(round_["id"], body))
        assert answer.status_code == 200, answer.text
        self.uploads[round_["number"]] = self.uploads.get(round_["number"], 0) + 1
        self._stage.uploaded.release()


@dataclass
class Stage:
    """Decides which rounds may start, so that each kill hits the middle of one; counts uploads."""

    may_begin: dict[int, threading.Event] = field(
        default_factory=lambda: {number: threading.Event() for number in range(1, ROUNDS + 1)}
    )
    uploaded: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def wait_for_uploads(self, count: int) -> None:
        """Wait until this many more uploads have been acknowledged."""
        for _ in range(count):
            assert self.uploaded.acquire(timeout=120)


def seed_of(number: int, place: int) -> int:
    return 100 * number + place


class Replicas:
    """Two coordinator processes, killed in turn with SIGKILL and restarted on the same port."""

    def __init__(self, db_url: str, folder: Path, **variables: str) -> None:
        self._db_url, self._folder, self._variables = db_url, folder, variables
        with ThreadPoolExecutor(2) as pool:
            self.processes = list(pool.map(lambda _: self._start("0"), range(2)))
        self.ports = [str(httpx.URL(process.url).port) for process in self.processes]
        self.kills = 0

    def _start(self, port: str) -> CoordinatorProcess:
        return CoordinatorProcess(self._db_url, self._folder, "--port", port, **self._variables)

    def kill_and_restart(self) -> None:
        """Kill the next one in turn; return when it serves again."""
        place = self.kills % 2
        self.processes[place].kill()
        self.kills += 1
        self.processes[place] = self._start(self.ports[place])

    def stop(self) -> None:
        """Stop both."""
        for process in self.processes:
            process.stop()


@contextmanager
def replicas(db_url: str, folder: Path, **variables: str) -> Iterator[Replicas]:
    running = Replicas(db_url, folder, **variables)
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("place", ["sql", "file"])
def test_twenty_sites_while_replicas_are_killed(
    postgres_url: str, tmp_path: Path, spool_address: str, place: str
) -> None:
    variables = {"DISTRANS_BLOBS": spool_address} if place == "file" else {}
    kind = next((kind for kind in PROXIES if shutil.which(kind)), PROXIES[-1])
    db_url = new_postgres_database(postgres_url)
    migrate(db_url)
    authority = trustme.CA()
    stage = Stage()
    with ExitStack() as stack:
        running = stack.enter_context(replicas(db_url, tmp_path, **variables))
        certificate = authority.issue_cert("localhost")
        ports = [int(port) for port in running.ports]
        url = stack.enter_context(reverse_proxy(kind, tmp_path / kind, certificate, ports))
        http = stack.enter_context(
            httpx.Client(
                base_url=url,
                verify=trusting(authority),
                timeout=30,
                trust_env=False,
                limits=httpx.Limits(max_connections=None),
            )
        )
        operator = running.processes[1]
        operator.create(PLAN)
        tokens = [operator.join(PLAN, f"site-{place:02}", {"cat": 1}).token for place in range(SITES)]
        sites = [
            SimulatedSite(Site(http, PLAN, f"site-{place:02}", token), place, stage)
            for place, token in enumerate(tokens)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(SITES))
        work = [pool.submit(site.run) for site in sites]
        for number in (1, 3):  # each replica once; the other one continues, also through the next round
            stage.may_begin[number].set()
            stage.wait_for_uploads(SITES // 2)
            stage.may_begin[number + 1].set()
            running.kill_and_restart()
            stage.wait_for_uploads(2 * SITES - SITES // 2)
        for future in work:
            future.result(timeout=120)
        check(http, sites)
        assert running.kills == 2


def check(http: httpx.Client, sites: list[SimulatedSite]) -> None:
    """Check that every round was aggregated exactly once, from all updates, bit for bit."""
    admin = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    history = persist(lambda: http.get("/v1/federations/pets/rounds", headers=admin)).json()
    assert [(row["number"], row["state"], row["updates"]) for row in history] == [
        (number, "done", SITES) for number in range(1, ROUNDS + 1)
    ]
    for site in sites:
        assert site.uploads == dict.fromkeys(range(1, ROUNDS + 1), 1), "nobody was asked twice"
    for number in range(1, ROUNDS + 1):
        path = f"/v1/federations/pets/model?round={number}"
        published = safetensors.torch.load(persist(lambda path=path: http.get(path, headers=admin)).content)
        bodies = [update_body(PLAN, {}, seed_of(number, place)) for place in range(SITES)]
        assert digest(encode(published)) == mean_bits(bodies)
