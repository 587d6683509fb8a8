"""An application that calls an agent, and a site that takes part by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from support.agents import AgentProcess, AgentThread
from support.coordinator import Site
from torch import Tensor

from client_agent.data import open_data
from shared.methods import client_half
from shared.methods.base import RoundTask, Tensors, Workplace
from shared.plan import FederationPlan


class App:
    """An application at the site, which calls the agent's web service."""

    def __init__(self, agent: AgentThread | AgentProcess, data: Path) -> None:
        self.http = httpx.Client(base_url=agent.wait_for_line(r"serving /predict on (\S+)"), trust_env=False)
        self._image = next(data.rglob("*.png")).read_bytes()

    def __enter__(self) -> "App":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def served_round(self) -> int:
        """The round of the model that answers."""
        answer = self.http.post("/predict", content=self._image, headers={"content-type": "image/png"})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["model"]["round"])

    def wait_until_served(self, number: int) -> None:
        """Ask until this model answers."""
        assert any(self.served_round() == number for _ in range(10_000))

    def info(self) -> Any:
        """What the agent says about itself."""
        return self.http.get("/info").json()


class Peer:
    """Another site, with the same images: it trains as an agent does, and may send something else than it trained."""

    def __init__(self, site: Site, plan: FederationPlan, data: Path) -> None:
        self._site, self._half = site, client_half(plan)
        self._data = open_data(str(data), plan)
        self._private: Tensors = {}

    def take_part(self, number: int, factor: float = 1.0) -> None:
        """Train round `number`; the last layer is sent multiplied by a factor."""
        self.send(number, lambda name, value: value * (factor if "logits" in name else 1))

    def send(self, number: int, change: Callable[[str, Tensor], Tensor]) -> None:
        """Train round `number`, and send each tensor as `change` makes it."""
        task, after = None, ""
        while task is None or task.round is None or task.round.number != number:
            task = self._site.task(after=after)
            after = task.ticket
        assert task.model is not None
        assert task.personal_url is not None
        model, personal = self._site.tensors(task.model.url), self._site.tensors(task.personal_url)
        round_task = RoundTask("peer", number, model, personal, task.round.facts)
        trained, self._private = self._half.train(round_task, self._private, Workplace(self._data.train))
        weights = {name: change(name, value) for name, value in trained.shared.items()}
        assert self._site.put(task.round.id, replace(trained, shared=weights).encode()).status_code == 200
