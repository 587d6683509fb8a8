"""A site whose agent has taken part in a few rounds on real digits, to test its page and to look at it.

`python -m support.site_pages FOLDER` (in `tests/`) photographs it at three widths in both themes.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Page
from support.agent_sites import App
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.coordinator import CoordinatorProcess, running
from support.waiting import eventually
from support.web_pages import photograph

from client_agent.settings import ServeOptions
from shared.contract.plan import FederationPlan

EVERY = ("0", "1", "2", "3", "4", "5")


@contextmanager
def finished_site(folder: Path, rounds: int = 4, **options: object) -> Iterator[tuple[App, Path, CoordinatorProcess]]:
    """Run a federation of two sites to its end, and yield one whose agent serves, with its images."""
    plan = digits_plan("lung-nodules", rounds=rounds, clients=2, epochs=2)
    served = ServeOptions(port=0, allow_offset_override=True, **options)  # type: ignore[arg-type]
    with (
        running(f"sqlite:///{folder / 'coordinator.db'}", folder, forked=True) as coordinator,
        _agents(coordinator, plan, folder, served) as (app, data),
    ):
        eventually(lambda: "finished" in app.info()["agent"]["outcome"], 300)
        yield app, data, coordinator


@contextmanager
def _agents(
    coordinator: CoordinatorProcess, plan: FederationPlan, folder: Path, served: ServeOptions
) -> Iterator[tuple[App, Path]]:
    coordinator.create(plan)
    here = write_digits(folder / "here", EVERY[:4], every=2)
    there = write_digits(folder / "there", EVERY[2:], every=2, start=1)
    north = enroll(coordinator, plan, "north-hospital", here, folder, coordinator.url)
    south = enroll(coordinator, plan, "south-hospital", there, folder, coordinator.url)
    with (
        AgentThread(north, serve=served, adapt_epochs=2) as agent,
        AgentThread(south, alone=False, adapt="off"),
        App(agent, here) as app,
    ):
        yield app, here


def try_images(app: App, data: Path, count: int) -> None:
    """Ask for predictions of this many of the site's images."""
    for file in sorted(data.rglob("*.png"))[:count]:
        app.predict(file.read_bytes())


def _classify(data: Path, page: Page) -> None:
    page.set_input_files("#images", sorted(data.rglob("*.png"))[30:200:60])
    page.wait_for_selector(".answer canvas")


if __name__ == "__main__":
    with TemporaryDirectory() as scratch, finished_site(Path(scratch), rounds=3) as (app, data, _):
        try_images(app, data, 120)
        target = Path(sys.argv[1])
        target.mkdir(exist_ok=True, parents=True)
        photograph({"site": str(app.http.base_url)}, target, prepare=partial(_classify, data))
