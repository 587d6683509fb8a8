"""Cost of agents that wait for a round, relative to a bare web server with as many open requests."""

import asyncio
import json
import resource
import secrets
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from sqlalchemy import insert, select

from lab.bench.poll_clients import WaitingClients
from lab.demo.processes import Processes
from server.service import federations, token_format
from server.service.context import Actor, Context
from server.store.database import Database
from server.store.schema import upgrade
from server.store.tables import Client, Federation
from shared.contract.errors import DistransError
from shared.contract.plan import validate_plan

_PER_TURN = 1000  # rows per statement
_PATIENCE_S = 600.0
_SPARE_FILES = 512  # descriptors besides the clients' connections


@dataclass(frozen=True)
class PollCost:
    """What waiting clients cost a server, and how soon they learned of a round."""

    idle_share: float  # of one core
    opening_s: float  # until the operator's call to open the round was answered
    telling_cpu_s: float  # processor time from that call until all clients have learned of the round
    learned_s: list[float]  # per client, since that call was sent

    @property
    def median_s(self) -> float:
        """Seconds until half of the clients had learned of the round."""
        return statistics.median(self.learned_s)

    @property
    def last_s(self) -> float:
        """Seconds until all clients had learned of the round."""
        return max(self.learned_s)


@dataclass(frozen=True)
class _Server:
    process_id: int
    http: httpx.Client
    start_path: str

    def start_round(self) -> None:
        self.http.post(self.start_path).raise_for_status()

    def catch_up(self) -> None:
        """Return once the server has dealt with the requests sent so far: calls queue up behind them."""
        for _ in range(2):
            self.http.get(self.start_path.rpartition("/")[0])

    def cpu_s(self) -> float:
        """Return the processor time used so far, in all threads."""
        # Linux's clock of a process. The times in /proc are sampled, which tells little about short bursts.
        return time.clock_gettime((~self.process_id << 3) | 2)


async def _measure(server: _Server, tokens: Sequence[str], seconds: float, say: Callable[[str], object]) -> PollCost:
    url = str(server.http.base_url)
    clients = WaitingClients(url, tokens)
    try:
        await clients.start(lambda sent: say(f"{sent} of {len(tokens)} clients wait"))
        await asyncio.to_thread(server.catch_up)
        say(f"measuring {len(tokens)} idle clients for {seconds:g} s")
        before, since = server.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (server.cpu_s() - before) / (time.perf_counter() - since)
        say("opening a round")
        before, called_at = server.cpu_s(), time.perf_counter()
        await asyncio.to_thread(server.start_round)
        opening_s = time.perf_counter() - called_at
        async with asyncio.timeout(_PATIENCE_S):
            learned_at = await clients.learn()
        return PollCost(share, opening_s, server.cpu_s() - before, sorted(at - called_at for at in learned_at))
    finally:
        clients.cancel()


def _enroll(db: Database, count: int) -> tuple[str, list[str]]:
    """Create a federation that `count` clients have joined; return its name and their tokens."""
    plan = validate_plan(
        {
            "name": f"bench-{uuid.uuid4().hex[:8]}",
            "classes": ["cat", "dog"],
            "image": {"channels": 1, "height": 14, "width": 14},
            "method": {"name": "fedavg"},
            "rounds": {"min_clients": count},
        }
    )
    federations.create(Context(db), Actor("operator"), plan)
    tokens, rows = [], []
    with db.write() as session:
        federation_id = session.execute(select(Federation.id).where(Federation.name == plan.name)).scalar_one()
        for number in range(count):
            client_id = uuid.uuid4().hex
            token = token_format.new_token("client", client_id)
            tokens.append(token.text)
            rows.append(
                {
                    "id": client_id,
                    "federation_id": federation_id,
                    "name": f"site-{number}",
                    "token_hash": token.hash,
                    "class_counts": "[10,10]",
                    "agent_version": "",
                    "device": "cpu",
                    "state": "active",
                    "joined_at": time.time(),
                    "last_seen_at": time.time(),
                }
            )
        for first in range(0, count, _PER_TURN):
            session.execute(insert(Client), rows[first : first + _PER_TURN])
    return plan.name, tokens


def measure_coordinator(
    folder: Path, count: int, seconds: float, db_url: str | None, say: Callable[[str], object]
) -> PollCost:
    """Measure a coordinator process, by default on a new SQLite file in the folder."""
    db_url = db_url or f"sqlite:///{folder / 'coordinator.db'}"
    admin_token = secrets.token_urlsafe(32)
    db = Database(db_url)
    upgrade(db)
    name, tokens = _enroll(db, count)
    db.close()
    with Processes(folder) as processes:
        log = processes.start(
            "coordinator",
            "server",
            ["serve", "--port", "0", "--data-dir", folder],
            DISTRANS_ADMIN_TOKEN=admin_token,
            DISTRANS_DB=db_url,
            DISTRANS_REQUESTS_PER_S="0",  # all clients call from one address
            DISTRANS_MAX_CONNECTIONS=str(count + 100),
            DISTRANS_CONNECTIONS_PER_ADDRESS=str(count + 100),
        )
        url = processes.wait_for(log, r"listening on (\S+)")
        processes.wait_for(log, r"(Application startup complete)")
        headers = {"Authorization": f"Bearer {admin_token}"}
        with httpx.Client(base_url=url, headers=headers, timeout=_PATIENCE_S, trust_env=False) as http:
            server = _Server(processes.process_id("coordinator"), http, f"/v1/federations/{name}/start")
            return asyncio.run(_measure(server, tokens, seconds, say))


def measure_floor(folder: Path, count: int, seconds: float, say: Callable[[str], object]) -> PollCost:
    """Measure a bare web server."""
    with Processes(folder) as processes:
        log = processes.start("floor", "lab.bench.bare_polls", [])
        url = processes.wait_for(log, r"listening on (\S+)")
        processes.wait_for(log, r"(Application startup complete)")
        with httpx.Client(base_url=url, timeout=_PATIENCE_S, trust_env=False) as http:
            server = _Server(processes.process_id("floor"), http, "/start")
            return asyncio.run(_measure(server, ["token"] * count, seconds, say))


def _allow_connections(count: int) -> None:
    """Raise the limit on open files for this process and those it starts."""
    wanted = count + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise DistransError(
                f"{count} clients need {wanted} open files, but the limit is {hard}.",
                next_step="Raise the limit (ulimit -Hn) or pass a smaller --clients.",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_bench(console: Console, count: int, seconds: float, db_url: str | None, json_file: Path | None) -> None:
    """Measure and print a table."""
    if sys.platform != "linux":
        raise DistransError("Only Linux tells how much processor time other processes use.", next_step="Use Linux.")
    _allow_connections(count)
    costs: dict[str, PollCost] = {}
    with tempfile.TemporaryDirectory() as folder, console.status("starting") as status:
        measurements = {
            "coordinator": partial(measure_coordinator, Path(folder), count, seconds, db_url),
            "bare server": partial(measure_floor, Path(folder), count, seconds),
        }
        for name, measure in measurements.items():
            costs[name] = measure(lambda text, name=name: status.update(f"{name}: {text}"))
    console.print(_table(costs, count))
    if json_file is not None:
        json_file.write_text(json.dumps({"clients": count, "seconds": seconds, **_as_json(costs)}, indent=2) + "\n")


def _table(costs: dict[str, PollCost], count: int) -> Table:
    table = Table(
        title=f"{count} clients that wait for a round",
        caption="Idle share: of one core. Delays count from the call that opens the round.",
    )
    for heading in ("server", "idle share", "CPU to tell all", "round open", "median told", "last told"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for name, cost in costs.items():
        times = (cost.telling_cpu_s, cost.opening_s, cost.median_s, cost.last_s)
        delays = (f"{1000 * time_s:.0f} ms" for time_s in times)
        table.add_row(name, f"{cost.idle_share:.1%}", *delays)
    return table


def _as_json(costs: dict[str, PollCost]) -> dict[str, object]:
    return {
        name.replace(" ", "_"): asdict(cost) | {"median_s": cost.median_s, "last_s": cost.last_s}
        for name, cost in costs.items()
    }
