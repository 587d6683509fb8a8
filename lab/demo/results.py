"""What came out of a demo: at each site, the served model, the site's own one and FedAvg, with a verdict."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from lab.datasets.site_folders import SiteFolder
from lab.demo.display import REFRESH_S, RunningSite, classes_cell, percent, stage
from lab.demo.processes import Processes
from shared.system.command_line import print_table

_PRIOR = "+prior"
_OUTCOMES = {"pays-off": "pays off", "no-difference": "unclear", "better-alone": "better alone"}
_NOTE = """\
served: the best candidate on the site's validation images; alone: trained on the site's images only.
verdict: served against alone, in points; unclear: the images are too few to show a difference."""


@dataclass(frozen=True)
class Findings:
    """What an agent found out about the last model on its test images."""

    site: SiteFolder
    info: dict[str, Any]

    def accuracy(self, name: str) -> float | None:
        """Return the accuracy of `served` or `alone`; None if it was not measured."""
        score = (self.info.get("scores") or {}).get(name)
        return None if score is None else score["accuracy"]

    @property
    def test_images(self) -> int:
        """Number of images that the accuracies and the verdict rest on."""
        scores = self.info.get("scores")
        return 0 if scores is None else int(scores["served"]["samples"])

    @property
    def is_alone_behind(self) -> bool:
        """Whether the agent was still training: a comparison would flatter the federation."""
        return not self.info.get("agent", {}).get("outcome")

    @property
    def verdict(self) -> str:
        """A short form of the verdict, such as `pays off +8.1`."""
        verdict = self.info.get("verdict")
        if verdict is None:
            return "–"
        outcome = _OUTCOMES.get(str(verdict["outcome"]), str(verdict["outcome"]))
        if verdict["outcome"] == "better-alone" or verdict["difference"] is None:
            return outcome
        return f"{outcome} {100 * verdict['difference']:+.1f}".replace("-", "−") + " *" * self.is_alone_behind

    @property
    def candidate(self) -> str:
        """What is served, such as `adapted+prior`, or `offset&adapted +prior` for a mean of two with the prior."""
        members = str((self.info.get("serving") or {}).get("candidate", "–")).split(" & ")
        if len(members) > 1 and all(member.endswith(_PRIOR) for member in members):
            return "&".join(member.removesuffix(_PRIOR) for member in members) + f" {_PRIOR}"
        return "&".join(members)


def await_findings(
    console: Console, processes: Processes, running: list[RunningSite], last_model: int, patience_s: float
) -> list[Findings]:
    """Wait until the agents have finished their own models, and return what each found out.

    After `patience_s` this goes on with what there is; the findings then say which agents are not done.
    """
    found: dict[str, Findings] = {}
    give_up_at = time.monotonic() + patience_s
    with stage(console, "waiting for the sites to finish their own models") as add, httpx.Client(timeout=30) as http:
        while True:
            for site in running:
                name = site.folder.name
                if (name not in found or found[name].is_alone_behind) and (info := site.info(http)):
                    serving = info.get("serving") or {}
                    has_ended = info["agent"]["outcome"] and serving.get("round") == last_model
                    found[name] = Findings(site.folder, info if has_ended else info | {"agent": {"outcome": ""}})
            done = sum(not findings.is_alone_behind for findings in found.values())
            add(f"{done} of {len(running)} done")
            if done == len(running) or time.monotonic() >= give_up_at:
                break
            processes.pause(REFRESH_S)
    return [found.get(site.folder.name) or Findings(site.folder, {}) for site in running]


def summary_of(admin: httpx.Client, federation: str) -> str:
    """Return what the coordinator says about all sites; empty if no site has a verdict."""
    view = admin.get(f"/v1/federations/{federation}").raise_for_status().json()
    summary = view["verdict_summary"] or {}
    return " ".join(summary[part] for part in ("sentence", "together") if summary.get(part))


def show_results(
    console: Console, findings: list[Findings], fedavg: dict[str, float | None] | None, summary: str
) -> None:
    """Print the final table and the summary; without a FedAvg column if the federation ran FedAvg."""
    print_table(results_table(findings, fedavg))
    if late := [one.site.name for one in findings if one.is_alone_behind]:
        console.print(f"* {', '.join(late)}: not finished in time; the comparison flatters the federation.")
    console.print(_NOTE, highlight=False, soft_wrap=True)
    if summary:
        console.print(f"\n{summary}", style="bold", highlight=False, soft_wrap=True)


def results_table(findings: list[Findings], fedavg: dict[str, float | None] | None) -> Table:
    """Return one row per site."""
    sizes = sorted({one.test_images for one in findings})
    images = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    title = f"Accuracy on each site's {images} test images, after the last round"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in ("site", "classes", "scanner"):
        table.add_column(heading)
    for heading in ("images", "served", "alone", *(["FedAvg"] if fedavg else [])):
        table.add_column(heading, justify="right")
    for heading in ("verdict", "what is served"):
        table.add_column(heading)
    for one in findings:
        values = [one.accuracy("served"), one.accuracy("alone"), *([fedavg[one.site.name]] if fedavg else [])]
        table.add_row(
            one.site.name,
            classes_cell(one.site),
            one.site.scanner,
            str(one.site.images),
            *map(percent, values),
            one.verdict,
            one.candidate,
        )
    return table
