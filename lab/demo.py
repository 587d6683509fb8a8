"""`distrans-lab demo`: a whole federation on one machine, with real processes that talk over HTTP."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from client_agent.data import SiteData, open_data
from client_agent.enrol import join_federation
from client_agent.settings import Connection
from client_agent.state import StateFolder
from client_agent.training import measure
from lab.processes import Processes
from lab.simulation import SimulatedClient, Simulation
from lab.splitting import DIGITS, SiteFolder, Sites, split_into_sites
from server.service.tokens import new_secret
from shared.method_options import FedAvgOptions
from shared.methods.base import ClientRecord
from shared.plan import FederationPlan, parse_plan
from shared.problems import DistransError

_MARKER = ".distrans-demo"


@dataclass(frozen=True)
class DemoOptions:
    """What a person may change."""

    folder: Path
    clients: int
    rounds: int
    dh: float
    method: str
    backbone: str
    data: str
    seed: int
    keep: bool


@dataclass(frozen=True)
class RunningSite:
    """An agent process and where it answers."""

    folder: SiteFolder
    url: str


def plan_text(options: DemoOptions, classes: tuple[str, ...]) -> str:
    """The demo's plan as the TOML file that is left in its folder."""
    names = ", ".join(f'"{name}"' for name in classes)
    digits = options.data == DIGITS
    side = {"lenet": 16 if digits else 32, "alexnet": 64}.get(options.backbone, 32)
    method = 'name = "distrans"\nupdate_rule = "alternating"' if options.method == "distrans" else 'name = "fedavg"'
    return f"""\
# The demo's plan. Change it and run it yourself: distrans-server federation create plan.toml
name = "demo"
preset = "learned-offset"      # Adam on the offset, so that it really moves
classes = [{names}]
seed = {options.seed}

[image]
channels = {1 if digits else 3}
height = {side}
width = {side}

[model]
backbone = "{options.backbone}"

[method]
{method}

[training]
lr = 0.05
batch_size = 16

[rounds]
count = {options.rounds}
min_clients = {options.clients}
deadline_s = 600
"""


def run_demo(console: Console, options: DemoOptions) -> None:
    """Split, start, train, compare, predict."""
    folder = _fresh_folder(options.folder)
    sites = split_into_sites(options.data, folder / "sites", options.clients, options.dh, options.seed)
    plan_file = folder / "plan.toml"
    plan_file.write_text(plan_text(options, sites.classes))
    plan = parse_plan(plan_file.read_text())
    console.print(
        f"{options.clients} sites, DH {sites.dh:.0%}, {len(sites.classes)} classes; everything is in {folder}",
        highlight=False,
    )
    token = new_secret()
    with Processes(folder / "logs") as processes:
        url = _start_coordinator(processes, folder, token)
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as admin:
            console.print(f"coordinator on {url} (API: {url}/docs)", highlight=False)
            _call(admin, "/v1/federations", plan.model_dump(mode="json"))
            with console.status("the sites check their images and join"):
                for site in sites.folders:
                    invite = _call(admin, f"/v1/federations/{plan.name}/invites")["token"]
                    state = StateFolder(folder / "agents" / site.name)
                    join_federation(state, Connection(server=url), invite, site.name, str(site.path))
            with console.status("the agents start"):
                running = _start_agents(processes, folder, sites)
            _call(admin, f"/v1/federations/{plan.name}/start")
            _watch(console, processes, admin, plan, running)
        histories = _wait_for_final_scores(processes, running, plan)
        fedavg = _train_fedavg(console, plan, sites)
        console.print(_results(sites, histories, fedavg))
        _show_predict(console, running[0])
        if options.keep:
            _keep_running(console, processes, url, running, folder)


def _fresh_folder(folder: Path) -> Path:
    """An empty folder; one that an earlier demo left is emptied, any other is left alone."""
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER).exists():
            raise DistransError(f"{folder} is not empty and not a demo's.", next_step="Name another folder with --dir.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).touch()
    return folder


def _start_coordinator(processes: Processes, folder: Path, token: str) -> str:
    arguments: list[str | Path] = ["serve", "--port", "0", "--data-dir", folder / "coordinator"]
    log = processes.start("coordinator", "server", arguments, DISTRANS_ADMIN_TOKEN=token, OMP_NUM_THREADS="1")
    return processes.wait_for(log, r"listening on (\S+)")


def _start_agents(processes: Processes, folder: Path, sites: Sites) -> list[RunningSite]:
    logs = {}
    for site in sites.folders:
        arguments: list[str | Path] = [
            "run",
            "--state",
            folder / "agents" / site.name,
            "--port",
            "0",
            "--local-baseline",
        ]
        options = ["--train-threads", "1", "--max-accuracy-drop", "1"]  # show every round's model
        logs[site.name] = processes.start(site.name, "agent", [*arguments, *options], OMP_NUM_THREADS="1")
    pattern = r"serving /predict on (\S+)"
    return [RunningSite(site, processes.wait_for(logs[site.name], pattern)) for site in sites.folders]


def _call(admin: httpx.Client, path: str, body: Any = None) -> Any:
    response = admin.post(path, json=body)
    if not response.is_success:
        raise DistransError(f"{path}: {response.json().get('detail', response.text)}")
    return response.json()


def _info(site: RunningSite) -> dict[str, Any]:
    try:
        return dict(httpx.get(f"{site.url}/info", timeout=5, trust_env=False).json())
    except httpx.HTTPError:  # busy for a moment
        return {}


def _watch(
    console: Console, processes: Processes, admin: httpx.Client, plan: FederationPlan, running: list[RunningSite]
) -> None:
    """Show rounds and sites until the federation has ended: a live table, or a line a round without a terminal."""
    shown = 0
    with Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else _no_live() as live:
        while True:
            processes.check()
            view = admin.get(f"/v1/federations/{plan.name}").json()
            rounds = admin.get(f"/v1/federations/{plan.name}/rounds", params={"limit": 1000}).json()
            if isinstance(live, Live):
                live.update(_live_table(view, rounds, [(site, _info(site)) for site in running]))
            for row in [row for row in rounds if row["state"] == "done" and row["number"] > shown]:
                losses = [upload["report"]["loss"] for upload in row["uploads"]]
                shown = row["number"]
                if not console.is_terminal:
                    loss = sum(losses) / max(len(losses), 1)
                    console.print(
                        f"round {shown} of {plan.rounds.count} done, mean training loss {loss:.3f}", highlight=False
                    )
            if view["state"] in ("finished", "cancelled", "paused"):
                if view["state"] != "finished":
                    raise DistransError(f"The federation is {view['state']}: {view['reason']}")
                return
            time.sleep(0.5)


class _no_live:  # noqa: N801 - stands in for Live where there is no terminal
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _live_table(
    view: dict[str, Any], rounds: list[dict[str, Any]], sites: list[tuple[RunningSite, dict[str, Any]]]
) -> Table:
    current = view["round"]["number"] if view["round"] else view["rounds_done"]
    table = Table(title=f"round {current} of {view['rounds_total']} · {view['waiting_for'] or view['state']}")
    for heading in ("site", "classes", "doing", "loss", "accuracy here", "images/s", "sent", "received"):
        table.add_column(heading)
    last = {upload["client"]: upload["report"] for row in rounds[-2:] for upload in row["uploads"]}
    for site, info in sites:
        report = last.get(site.folder.name)
        history = info.get("history") or [{}]
        moved = info.get("bytes", {"sent": 0, "received": 0})
        table.add_row(
            site.folder.name,
            " ".join(site.folder.classes[:10]),
            info.get("agent", {}).get("doing", "…"),
            f"{report['loss']:.3f}" if report else "–",
            _percent(history[-1].get("with_offset")),
            f"{report['samples'] / max(report['seconds'], 1e-6):.0f}" if report else "–",
            f"{moved['sent'] / 1e6:.1f} MB",
            f"{moved['received'] / 1e6:.1f} MB",
        )
    return table


def _wait_for_final_scores(
    processes: Processes, running: list[RunningSite], plan: FederationPlan
) -> dict[str, dict[str, Any]]:
    """What each agent measured with the last model."""
    scores: dict[str, dict[str, Any]] = {}
    give_up_at = time.monotonic() + 60
    while len(scores) < len(running):
        processes.check()
        for site in running:
            for row in _info(site).get("history", []):
                if row["model"] == plan.rounds.count:
                    scores[site.folder.name] = row
        if time.monotonic() > give_up_at:
            raise DistransError("The agents did not measure the last model in time.")
        time.sleep(0.2)
    return scores


def _train_fedavg(console: Console, plan: FederationPlan, sites: Sites) -> dict[str, float | None]:
    """FedAvg on the same sites, from the same start, for the same rounds; in memory, the mathematics are the same."""
    fedavg = plan.model_copy(update={"method": FedAvgOptions()})
    data: dict[str, SiteData] = {}
    clients = []
    for site in sites.folders:
        opened = data[site.name] = open_data(str(site.path), plan)
        record = ClientRecord(site.name, tuple(opened.report.class_counts.values()))
        clients.append(SimulatedClient(record, opened.train, opened.test))
    simulation = Simulation(fedavg, clients)
    with console.status("FedAvg for comparison") as status:
        while simulation.round < fedavg.rounds.count:
            simulation.run_round(evaluate=False)
            status.update(f"FedAvg for comparison: round {simulation.round} of {fedavg.rounds.count}")
    scores = {}
    for client in clients:
        predictor = simulation.client.predictor(simulation.task(client), client.private, simulation.runtime)
        result = measure(predictor, data[client.record.id], fedavg)
        scores[client.record.id] = result.accuracy if result else None
    return scores


def _results(sites: Sites, histories: dict[str, dict[str, Any]], fedavg: dict[str, float | None]) -> Table:
    table = Table(title="Accuracy on each site's held-out images, after the last round")
    headings = ("site", "classes", "images", "global + own offset", "global, no offset", "site alone", "FedAvg")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("site", "classes") else "right")
    for site in sites.folders:
        row = histories[site.name]
        scores = (row["with_offset"], row["without_offset"], row["local"], fedavg[site.name])
        table.add_row(site.name, " ".join(site.classes[:10]), str(site.images), *map(_percent, scores))
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _show_predict(console: Console, site: RunningSite) -> None:
    """One call of `/predict`, as a person would type it, and its answer."""
    image = sorted((site.folder.path / "test").rglob("*.*"))[0]
    kind = "image/jpeg" if image.suffix.lower() in (".jpg", ".jpeg") else "image/png"
    console.print(f"\nAn image of class {image.parent.name!r} at {site.folder.name}:", highlight=False)
    console.print(
        f"$ curl -s -H 'Content-Type: {kind}' --data-binary @{image} '{site.url}/predict?top_k=2'",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    answer = httpx.post(
        f"{site.url}/predict",
        params={"top_k": 2},
        content=image.read_bytes(),
        headers={"Content-Type": kind},
        timeout=30,
        trust_env=False,
    )
    console.print_json(answer.text)


def _keep_running(console: Console, processes: Processes, url: str, running: list[RunningSite], folder: Path) -> None:
    console.print(f"\nStill running until Ctrl-C:\n  coordinator  {url}/docs", highlight=False)
    for site in running:
        console.print(f"  {site.folder.name}     {site.url}/docs", highlight=False)
    console.print(f"  logs         {folder / 'logs'}", highlight=False)
    try:
        while True:
            processes.check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("stopping …")
