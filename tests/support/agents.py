"""Agents of sites that hold real digits, as processes and as threads."""

import io
import logging
import threading
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from support.coordinator import Coordinator
from support.log_lines import LogLines
from support.processes import LoggedProcess

from client_agent.enrol import join_federation
from client_agent.run import run_until
from client_agent.settings import RunOptions
from client_agent.sources import digit_images
from client_agent.state import StateFolder
from shared.http.connection import Connection
from shared.plan import FederationPlan, validate_plan
from shared.problems import DistransError

CLASSES = ("0", "1", "2", "3", "4", "5")


def digits_plan(name: str = "digits", rounds: int = 3, clients: int = 3, **training: Any) -> FederationPlan:
    """LeNet on the digits 0 … 5 with an offset that really moves; each site keeps its own."""
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
    """`folder/CLASS/N.png` with the real digits of these classes; every n-th one, from a start."""
    images, labels = digit_images()
    pixels = (images * 255).round().to(torch.uint8)
    for label in classes:
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in torch.nonzero(labels == int(label))[start::every, 0].tolist():
            Image.fromarray(pixels[number, 0].numpy()).save(folder / label / f"{number}.png")
    return folder


def enrol(coordinator: Coordinator, plan: FederationPlan, name: str, data: Path, folder: Path, url: str) -> StateFolder:
    """Invite a site and join it; its state folder."""
    invite = coordinator.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
    state = StateFolder(folder / name)
    join_federation(state, Connection(server=url), invite, name, str(data))
    return state


class AgentProcess(LoggedProcess):
    """`distrans-agent run` as a process of its own, see support.forked."""

    def __init__(self, state: StateFolder, *options: str, **environment: str) -> None:
        command = ["distrans-agent", "run", "--state", state.path, "--port", "0", "--train-threads", "1", *options]
        super().__init__(command, forked=True, NO_PROXY="*", **environment)

    def predict_url(self) -> str:
        """Where it serves."""
        return self.wait_for_line(r"serving /predict on (\S+)")


class AgentThread:
    """An agent's loop and web service in threads of the test's process; as a context it is stopped at the end."""

    def __init__(self, state: StateFolder, **options: Any) -> None:
        self._log = LogLines()
        self._stopping, self._over = threading.Event(), threading.Event()
        self.ended_with: DistransError | None = None
        defaults = {"serve": None, "train_threads": 1, "progress": False}
        chosen = RunOptions(**(defaults | options))
        self._thread = threading.Thread(target=self._run, args=(state, chosen), daemon=True)

    def _run(self, state: StateFolder, options: RunOptions) -> None:
        try:
            run_until(self._stopping, state, options, Console(file=io.StringIO()))
        except DistransError as error:
            self.ended_with = error
        finally:
            self._over.set()
            self._log.wake()

    def __enter__(self) -> "AgentThread":
        self._handler = _ToLines(self._log)
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

    @property
    def lines(self) -> list[str]:
        """Its log so far."""
        return self._log.lines

    def wait_for_line(self, pattern: str, timeout_s: float = 60) -> str:
        """The first group (or the whole) of the first line that matches."""
        return self._log.wait_for(pattern, self._over.is_set, timeout_s)

    def wait(self, timeout_s: float = 60) -> None:
        """Until it ends by itself."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "\n".join(self.lines)


class _ToLines(logging.Handler):
    def __init__(self, log: LogLines) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.add(record.getMessage())
