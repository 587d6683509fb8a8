"""Agents of sites that hold real digits, as processes."""

from pathlib import Path

import numpy as np
import sklearn.datasets
from PIL import Image
from support.coordinator import Coordinator
from support.processes import LoggedProcess

from client_agent.enrol import join_federation
from client_agent.settings import Connection
from client_agent.state import StateFolder
from shared.plan import FederationPlan, validate_plan

CLASSES = ("0", "1", "2", "3", "4", "5")


def digits_plan(name: str = "digits", rounds: int = 3, clients: int = 3) -> FederationPlan:
    """LeNet on the digits 0 … 5 with an offset that really moves; each site keeps its own."""
    return validate_plan(
        {
            "name": name,
            "preset": "learned-offset",
            "classes": CLASSES,
            "image": {"channels": 1, "height": 16, "width": 16},
            "method": {"offset_aggregation": "none"},
            "training": {"lr": 0.05, "batch_size": 16},
            "rounds": {"count": rounds, "min_clients": clients, "deadline_s": 300},
        }
    )


def write_digits(folder: Path, classes: tuple[str, ...], *, every: int = 1, start: int = 0) -> Path:
    """`folder/CLASS/N.png` with the real digits of these classes; every n-th one, from a start."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    for label in classes:
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(labels == int(label))[start::every]:
            grey = np.round(pixels[number].reshape(8, 8) * (255 / 16)).astype(np.uint8)
            Image.fromarray(grey).save(folder / label / f"{number}.png")
    return folder


def enrol(coordinator: Coordinator, plan: FederationPlan, name: str, data: Path, folder: Path, url: str) -> StateFolder:
    """Invite a site and join it; its state folder."""
    invite = coordinator.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
    state = StateFolder(folder / name)
    join_federation(state, Connection(server=url), invite, name, str(data))
    return state


class AgentProcess(LoggedProcess):
    """`distrans-agent run`."""

    def __init__(self, state: StateFolder, *options: str) -> None:
        super().__init__(
            ["distrans-agent", "run", "--state", state.path, "--port", "0", "--train-threads", "1", *options],
            NO_PROXY="*",
        )

    def predict_url(self) -> str:
        """Where it serves."""
        return self.wait_for_line(r"serving /predict on (\S+)")
