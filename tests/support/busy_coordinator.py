"""A coordinator with a federation whose sites train, and one of them is late: something to look at."""

import math
from dataclasses import dataclass

from support.api import SocketApi
from support.coordinator import Site
from support.plans import small_plan, update_body

from shared.contract.plan import FederationPlan

NAMES = ("north-hospital", "south-hospital", "east-clinic", "west-clinic", "lake-hospital", "island-clinic")
_COUNTS = ((412, 31), (96, 380), (250, 240), (18, 160), (333, 12), (64, 70))


@dataclass
class Busy:
    """A coordinator, a running federation, and its sites."""

    api: SocketApi
    plan: FederationPlan
    sites: list[Site]

    def play_round(self, number: int, *, without: int = 0) -> None:
        """Let all sites but the last few measure the newest model and upload."""
        for index in range(len(self.sites) - without):
            self.upload(index, number)

    def upload(self, index: int, number: int) -> None:
        """Do one site's part in a round."""
        site = self.sites[index]
        task = site.wait_for_round(number)
        assert task.round is not None
        self.measure(index, number - 1)
        body = update_body(self.plan, task.round.facts, seed=number * 31 + index, samples=sum(_COUNTS[index]))
        assert site.put(task.round.id, body).status_code == 200

    def measure(self, index: int, model: int) -> None:
        """Report what a model scored at a site, and whether joining pays off there."""
        correct = round(100 * (0.55 + 0.05 * index + (0.3 - 0.04 * index) * (1 - math.exp(-model / 4))))
        alone = min(correct, 52 + 6 * index)
        paired = {
            "samples": 100, "both": alone - 4, "only_alone": 4,
            "only_served": correct - alone + 4, "neither": 100 - correct - 4,
        }  # fmt: skip
        result = {"samples": 100, "correct": correct, "loss_sum": 160 * math.exp(-model / 6) + 30.0}
        answer = self.sites[index].http.put(
            f"/v1/models/{model}/evaluation",
            json=result | {"paired": paired, "candidate": "offset+prior"},
            headers=self.sites[index].headers,
        )
        assert answer.status_code in (200, 204), answer.text

    def report_status(self, index: int, activity: str, detail: str, *troubles: tuple[str, str]) -> None:
        """Let a site's agent say what it is doing."""
        shown = [{"kind": kind, "message": message} for kind, message in troubles]
        answer = self.sites[index].http.put(
            "/v1/me/status",
            json={"activity": activity, "detail": detail, "troubles": shown},
            headers=self.sites[index].headers,
        )
        assert answer.status_code == 204, answer.text


def busy(api: SocketApi, rounds: int = 12, name: str = "lung-nodules") -> Busy:
    """Create the federation and play some rounds; in the open one, two sites have not uploaded yet."""
    plan = small_plan(name, classes=["benign", "malignant"], rounds={"count": 40, "deadline_s": 3600, "quorum": 0.6})
    plan = plan.model_copy(update={"rounds": plan.rounds.model_copy(update={"min_clients": len(NAMES)})})
    api.create(plan)
    sites = [api.join(plan, site, dict(zip(plan.classes, _COUNTS[at], strict=True))) for at, site in enumerate(NAMES)]
    found = Busy(api, plan, sites)
    for number in range(1, rounds + 1):
        found.play_round(number)
    found.play_round(rounds + 1, without=2)
    found.report_status(0, "waiting", "waiting for the other sites")
    found.report_status(4, "training", f"training round {rounds + 1}")
    found.report_status(5, "training", f"training round {rounds + 1}", ("images", "3 images cannot be read."))
    return found
