"""An application that calls an agent, and a site that trains without one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx
from support.agents import AgentProcess, AgentThread
from support.coordinator import Site
from torch import Tensor

from client_agent.data.dataset import open_data
from shared.contract.plan import FederationPlan
from shared.learning.methods import client_half
from shared.learning.methods.base import RoundTask, TrainingContext
from shared.tensors.names import Tensors


class App:
    """An application at the site that calls the agent's web service."""

    def __init__(self, agent: AgentThread | AgentProcess, data: Path) -> None:
        self.http = httpx.Client(base_url=agent.predict_url(), trust_env=False)
        self._image = next(data.rglob("*.png")).read_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def predict(self, image: bytes) -> Any:
        """Return the agent's answer to a PNG image."""
        answer = self.http.post("/predict", content=image, headers={"content-type": "image/png"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def served_round(self) -> int:
        """Return the round of the model that answers."""
        return int(self.predict(self._image)["model"]["round"])

    def wait_until_served(self, number: int) -> None:
        """Ask for predictions until this model answers."""
        assert any(self.served_round() == number for _ in range(10_000))

    def info(self) -> Any:
        """Return what the agent reports about itself."""
        return self.http.get("/info").json()


class Peer:
    """Another site with the same images, which trains as an agent does but may upload something else."""

    def __init__(self, site: Site, plan: FederationPlan, data: Path) -> None:
        self._site, self._half = site, client_half(plan)
        self._data = open_data(str(data), plan)
        self._private: Tensors = {}

    def take_part(self, number: int, factor: float = 1.0) -> None:
        """Train a round and upload the result with its last layer multiplied by a factor."""
        self.send(number, lambda name, value: value * (factor if "logits" in name else 1))

    def send(self, number: int, change: Callable[[str, Tensor], Tensor]) -> None:
        """Train a round and upload `change(name, tensor)` for each shared tensor."""
        task = self._site.wait_for_round(number)
        assert task.round is not None
        assert task.model is not None
        assert task.personal_url is not None
        model, personal = self._site.tensors(task.model.url), self._site.tensors(task.personal_url)
        round_task = RoundTask("peer", number, model, personal, task.round.facts)
        trained, self._private = self._half.train(round_task, self._private, TrainingContext(self._data.train))
        weights = {name: change(name, value) for name, value in trained.shared.items()}
        assert self._site.put(task.round.id, replace(trained, shared=weights).encode()).status_code == 200
