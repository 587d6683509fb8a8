"""What a demo shows while it runs: a live table, or one line per round; and one call of `/predict`."""

import shlex
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lab.datasets.site_folders import SiteFolder
from lab.demo.processes import Processes
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan

REFRESH_S = 0.5
_CLASSES_WIDTH = 14


@dataclass(frozen=True)
class RunningSite:
    """A running agent and its URL."""

    folder: SiteFolder
    url: str

    def info(self, http: httpx.Client) -> dict[str, Any]:
        """Return the agent's /info; nothing while it is too busy to respond."""
        try:
            return dict(http.get(f"{self.url}/info").json())
        except httpx.HTTPError:
            return {}


@contextmanager
def stage(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner whose details the block can update; without a terminal, print one line."""
    if console.is_terminal:
        with console.status(text) as status:
            yield lambda detail: status.update(f"{text}: {detail}")
    else:
        console.print(f"{text} …", highlight=False)
        yield lambda _detail: None


def watch(
    console: Console, processes: Processes, admin: httpx.Client, plan: FederationPlan, running: list[RunningSite]
) -> int:
    """Show rounds and sites until the federation ends, and return the number of the last model.

    On a terminal this is a live table, otherwise one line per round.
    """
    live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
    reports: dict[str, dict[str, Any]] = {}
    done = 0
    with live or nullcontext(), httpx.Client(timeout=5) as http:
        while True:
            view = _get(admin, f"/v1/federations/{plan.name}")
            for row in _get(admin, f"/v1/federations/{plan.name}/rounds?after={done}"):
                reports |= {upload["client"]: upload["report"] for upload in row["uploads"]}
                if row["state"] == "done":
                    done = row["number"]
                    if live is None:
                        console.print(_round_line(row, plan), soft_wrap=True, highlight=False)
            if view["state"] == "finished":
                return int(view["latest_model"])
            if view["state"] in ("cancelled", "paused"):
                raise DistransError(f"The federation is {view['state']}: {view['reason']}")
            if live is not None:
                live.update(_live_table(view, reports, [(site, site.info(http)) for site in running]))
            processes.pause(REFRESH_S)


def _get(admin: httpx.Client, path: str) -> Any:
    return admin.get(path).raise_for_status().json()


def _round_line(row: dict[str, Any], plan: FederationPlan) -> str:
    reports = [upload["report"] for upload in row["uploads"]]
    images = sum(report["samples"] for report in reports)
    loss, accuracy = (
        sum(report["samples"] * report[name] for report in reports) / max(images, 1) for name in ("loss", "accuracy")
    )
    speed = sum(_images_per_second(report) for report in reports)
    sent = sum(upload["size_bytes"] for upload in row["uploads"]) / 1e6
    return (
        f"round {row['number']} of {plan.rounds.count}: training loss {loss:.3f}, training accuracy {accuracy:.1%}, "
        f"{speed:.0f} images/s, {sent:.1f} MB uploaded"
    )


def _images_per_second(report: dict[str, Any]) -> float:
    return float(report["samples"] / max(report["seconds"], 1e-6))


def _live_table(
    view: dict[str, Any], reports: dict[str, dict[str, Any]], sites: list[tuple[RunningSite, dict[str, Any]]]
) -> Table:
    table = Table(title=_headline(view), box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("site", no_wrap=True)
    table.add_column("classes", no_wrap=True)
    table.add_column("doing", min_width=20, no_wrap=True)  # fits the longest, so that the table does not jump
    for heading in ("loss", "accuracy", "images/s", "moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for site, info in sites:
        report = reports.get(site.folder.name)
        history = info.get("history") or [{}]
        table.add_row(
            site.folder.name,
            classes_cell(site.folder),
            _doing(info),
            f"{report['loss']:.3f}" if report else "–",
            percent(history[-1].get("test")),
            f"{_images_per_second(report):.0f}" if report else "–",
            f"{sum(info.get('bytes', {}).values()) / 1e6:.1f} MB",
        )
    table.caption = "loss: last local training; accuracy: what the site serves, on test images"
    return table


def _doing(info: dict[str, Any]) -> str:
    """Return what an agent is doing, in at most 20 characters."""
    doing = str(info.get("agent", {}).get("doing", "…"))
    return doing.replace("training this site's own model", "own model").replace(" on this site's images", "")


def _headline(view: dict[str, Any]) -> str:
    current = view["round"]
    if current is None:
        return f"{view['rounds_done']} of {view['rounds_total']} rounds done"
    return (
        f"round {current['number']} of {view['rounds_total']} · "
        f"{current['updates']} of {current['participants']} updates received"
    )


def percent(value: float | None) -> str:
    """Format a share as a percentage, or as a dash for None."""
    return "–" if value is None else f"{value:.1%}"


def classes_cell(site: SiteFolder) -> str:
    """Return a site's classes, shortened to fit a table; `1269` if they are digits or letters."""
    if all(len(name) == 1 for name in site.classes) and len(site.classes) <= _CLASSES_WIDTH:
        return "".join(site.classes)
    return textwrap.shorten(" ".join(site.classes), _CLASSES_WIDTH, placeholder=" …")


def short(path: Path) -> Path:
    """Return the path relative to the current folder, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) and path != Path.cwd() else path


def show_predict(console: Console, site: RunningSite) -> None:
    """Print one call of `/predict` as a shell command, and the response."""
    images = sorted(path for path in (site.folder.path / "test").rglob("*") if _media_type(path))
    if not images:
        return
    image, kind = images[0], _media_type(images[0])
    console.print(f"\nAn image of class {image.parent.name!r} at {site.folder.name}:", highlight=False, markup=False)
    file = shlex.quote(str(short(image)))
    console.print(
        f"$ curl -s -H 'Content-Type: {kind}' --data-binary @{file} '{site.url}/predict?top_k=2'",
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
    )
    console.print(answer.text, soft_wrap=True, highlight=False, markup=False)


def _media_type(image: Path) -> str:
    """Return the media type if /predict accepts it, else an empty string."""
    return {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}.get(image.suffix.lower(), "")
