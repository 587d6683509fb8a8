"""`distrans-lab demo`: a federation on one machine, with real processes that talk over HTTP."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from client_agent.coordinator.enrollment import join_federation
from client_agent.state.folder import StateFolder
from lab.datasets.site_folders import Division, SiteFolder, plan_split
from lab.demo.display import RunningSite, short, show_predict, stage, watch
from lab.demo.fedavg import threads, train_fedavg
from lab.demo.folder import claim
from lab.demo.plan import DemoOptions, plan_text, read_plan
from lab.demo.processes import Processes
from lab.demo.results import await_findings, show_results, summary_of
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan, parse_plan
from shared.http.client_connection import Connection
from shared.learning.methods import METHODS

_PATIENCE_S = 300.0  # for the sites' own models, at least


def run_demo(console: Console, options: DemoOptions) -> None:
    """Split the data, start, train, compare and predict. Invalid options fail before anything is written."""
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"  # everything is on this machine
    with stage(console, f"splitting {options.data}"):
        division = plan_split(
            options.data, options.clients, options.dh, options.seed, images=options.images, shift=options.shift
        )
    text, plan = _plan(options, division)
    with claim(options.folder) as folder:
        (folder / "plan.toml").write_text(text, encoding="utf-8")
        sites = []
        with stage(console, "writing the sites' images") as add:
            for share in division.sites:
                add(share.name)
                sites.append(share.write(folder / "sites"))
        console.print(
            f"{len(sites)} sites, {len(division.classes)} classes, DH {division.dh:.0%}; {plan.method.name} on "
            f"{plan.model.backbone}; everything is in {short(folder)}",
            soft_wrap=True,
            highlight=False,
        )
        try:
            with Processes(folder / "logs") as processes:
                try:
                    _run_federation(console, processes, folder, plan, sites, keep=options.keep)
                finally:
                    with stage(console, "stopping"):
                        processes.stop()
        except KeyboardInterrupt:
            console.print("Stopped. Nothing is left running.")
            if not options.keep:
                raise
        else:
            console.print(
                "\nNothing is left running; --keep would keep the processes. To serve a site's last model again:"
                f"\n  {_program('distrans-agent')} run --state {short(folder)}/agents/{sites[0].name}",
                soft_wrap=True,
                highlight=False,
            )


def _program(name: str) -> str:
    """Return the command to type: in a fresh clone the programs are not on the PATH."""
    return name if shutil.which(name) else str(short(Path(sys.executable).parent / name))


def _plan(options: DemoOptions, division: Division) -> tuple[str, FederationPlan]:
    if options.plan is not None:
        return read_plan(options.plan, options.clients, division.classes)
    if options.method not in METHODS:
        raise DistransError(f"Unknown method {options.method!r}.", next_step=f"Use {', '.join(METHODS)}.")
    text = plan_text(options, division.classes)
    return text, parse_plan(text)


def _run_federation(
    console: Console, processes: Processes, folder: Path, plan: FederationPlan, sites: list[SiteFolder], *, keep: bool
) -> None:
    with stage(console, "starting the coordinator"):
        url = _start_coordinator(processes, folder)
    console.print(f"coordinator at {url} (API: {url}/docs)", highlight=False)
    token = (folder / "coordinator" / "admin-token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as admin:
        _post(admin, "/v1/federations", plan.model_dump(mode="json"))
        with stage(console, "checking images and joining") as add:
            for site in sites:
                add(site.name)
                invite = _post(admin, f"/v1/federations/{plan.name}/invites")["token"]
                state = StateFolder(folder / "agents" / site.name)
                join_federation(state, Connection(server=url), invite, site.name, str(site.path))
        with stage(console, "starting the agents, one process each") as add:
            running: list[RunningSite] = []
            for site, log in _start_agents(processes, folder, plan, sites):
                add(f"{len(running)} of {len(sites)} ready")
                running.append(RunningSite(site, processes.wait_for(log, r"serving /predict on (\S+)")))
        _post(admin, f"/v1/federations/{plan.name}/start")
        started = time.monotonic()
        last_model = watch(console, processes, admin, plan, running)
        fedavg = train_fedavg(console, plan, sites, last_model) if plan.method.name != "fedavg" else None
        patience_s = max(_PATIENCE_S, 2 * (time.monotonic() - started))  # own models take no more steps than the rounds
        findings = await_findings(console, processes, running, last_model, patience_s)
        show_results(console, findings, fedavg, summary_of(admin, plan.name))
    show_predict(console, running[0])
    if keep:
        _keep_running(console, processes, url, running, folder)


def _start_coordinator(processes: Processes, folder: Path) -> str:
    arguments: list[str | Path] = ["serve", "--port", "0", "--data-dir", folder / "coordinator"]
    log = processes.start("coordinator", "server", arguments, OMP_NUM_THREADS="1")
    return processes.wait_for(log, r"listening on (\S+)")


def _start_agents(
    processes: Processes, folder: Path, plan: FederationPlan, sites: list[SiteFolder]
) -> list[tuple[SiteFolder, Path]]:
    """Start one agent per site; return each site with its agent's log."""
    started = []
    for site in sites:
        arguments: list[str | Path] = ["run", "--state", folder / "agents" / site.name, "--port", "0"]
        arguments += ["--max-accuracy-drop", "1"]  # serve every round's model
        arguments += [
            "--share-verdict",
            "full",
        ]  # all sites are the user's, and the summary then knows what each serves
        arguments += ["--train-threads", str(threads(plan, len(sites)))]
        started.append((site, processes.start(site.name, "client_agent", arguments, OMP_NUM_THREADS="1")))
    return started


def _post(admin: httpx.Client, path: str, body: Any = None) -> Any:
    response = admin.post(path, json=body)
    if not response.is_success:
        raise DistransError(f"{path}: {response.json().get('detail', response.text)}")
    return response.json()


def _keep_running(console: Console, processes: Processes, url: str, running: list[RunningSite], folder: Path) -> None:
    rows = [("dashboard", url), ("admin token", short(folder / "coordinator" / "admin-token"))]
    rows += [(site.folder.name, site.url) for site in running]
    rows += [("logs", short(folder / "logs"))]
    console.print("\nRunning until Ctrl-C:", highlight=False)
    for name, place in rows:
        console.print(f"  {name:<12} {place}", soft_wrap=True, highlight=False)
    while True:
        processes.pause(3600)
