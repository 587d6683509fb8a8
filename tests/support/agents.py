"""Agents of sites with real images of digits, as processes or threads."""

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from rich.console import Console
from support.coordinator import Coordinator
from support.log_lines import LogLines
from support.processes import LoggedProcess

from client_agent.coordinator.enrollment import join_federation
from client_agent.data.sources import digit_images
from client_agent.process import run_until_stopped
from client_agent.settings import RunOptions
from client_agent.state.folder import StateFolder
from shared.contract.errors import DistransError
from shared.contract.plan import FederationPlan, validate_plan
from shared.http.client_connection import Connection

CLASSES = ("0", "1", "2", "3", "4", "5")


def digits_plan(name: str = "digits", rounds: int = 3, clients: int = 3, **training: Any) -> FederationPlan:
    """Return a plan for LeNet on the digits 0 … 5 whose offset clearly moves and stays at its site."""
    return validate_plan(
        {
            "name": name,
            "preset": "learned-offset",
            "classes": CLASSES,
            "image": {"channels": 1, "height": 16, "width": 16},
            "method": {"offset_aggregation": "none"},
            "training": {"lr": 0.05, "batch_size": 16} | training,
            "rounds": {"count": rounds, "min_clients": clients, "deadline_s": 300},
        }
    )


def write_digits(folder: Path, classes: tuple[str, ...], *, every: int = 1, start: int = 0) -> Path:
    """Write every n-th real digit of these classes, counting from `start`, to `folder/CLASS/N.png`."""
    images, labels = digit_images()
    pixels = (images * 255).round().to(torch.uint8)
    for label in classes:
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in torch.nonzero(labels == int(label))[start::every, 0].tolist():
            Image.fromarray(pixels[number, 0].numpy()).save(folder / label / f"{number}.png")
    return folder


def enroll(
    coordinator: Coordinator, plan: FederationPlan, name: str, data: Path, folder: Path, url: str
) -> StateFolder:
    """Invite a site, let it join, and return its state folder."""
    invite = coordinator.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
    state = StateFolder(folder / name)
    join_federation(state, Connection(server=url), invite, name, str(data))
    return state


class _ServingAgent(LogLines):
    def predict_url(self) -> str:
        """Wait for the agent's web service and return its URL."""
        return self.wait_for_line(r"serving /predict on (\S+)")


class AgentProcess(LoggedProcess, _ServingAgent):
    """`distrans-agent run` in a forked process, see support.launcher."""

    def __init__(self, state: StateFolder, *options: str, **environment: str) -> None:
        command = ["distrans-agent", "run", "--state", state.path, "--port", "0", "--train-threads", "1", *options]
        super().__init__(command, forked=True, NO_PROXY="*", **environment)


class AgentThread(_ServingAgent):
    """An agent's loop and web service in threads of the test process; a context manager that stops them."""

    def __init__(self, state: StateFolder, **options: Any) -> None:
        super().__init__()
        self._stopping = threading.Event()
        self.ended_with: DistransError | None = None
        defaults = {"serve": None, "train_threads": 1}
        chosen = RunOptions(**(defaults | options))
        self._thread = threading.Thread(target=self._run, args=(state, chosen), daemon=True)

    def _run(self, state: StateFolder, options: RunOptions) -> None:
        try:
            run_until_stopped(self._stopping, state, options, Console(file=io.StringIO()))
        except DistransError as error:
            self.ended_with = error
        finally:
            self._end_log()

    def __enter__(self) -> Self:
        self._handler = _CallingHandler(self._add_line)
        logger = logging.getLogger("client_agent")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        logger = logging.getLogger("client_agent")
        logger.removeHandler(self._handler)
        logger.setLevel(self._level)

    def wait(self, timeout_s: float = 60) -> None:
        """Wait for the agent to end without being stopped."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "\n".join(self.lines)


class _CallingHandler(logging.Handler):
    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record.getMessage())
