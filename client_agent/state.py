"""The agent's folder: identity, private tensors, the upload in flight, the last models, and what was measured.

identity.json            who it is (0600)
private.safetensors      tensors that a method keeps at the site, such as the offset
pending/                 an upload not yet acknowledged, with the private tensors that go with it
models/N/                model, personal and private tensors as they belong together
baseline.safetensors     the model trained on this site's data alone (--local-baseline)
history.jsonl            one line a model: what it scored here
pin                      the model that /predict is pinned to, if any
lock                     held by the running agent
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from client_agent.errors import StateError
from client_agent.files import sync_folder, write_durably
from client_agent.settings import Identity
from shared.evaluation import Evaluation
from shared.methods.base import RoundTask, Tensors
from shared.wire import encode


class PendingUpload(BaseModel):
    """An update that the coordinator may or may not have."""

    model_config = ConfigDict(frozen=True)
    round_id: int
    round_number: int
    digest: str


class HistoryLine(BaseModel):
    """What one global model scored on this site's held-out images."""

    model_config = ConfigDict(frozen=True)
    model: int
    with_offset: Evaluation | None
    without_offset: Evaluation | None
    local: Evaluation | None = None
    served: bool = True
    held_by_pin: bool = False
    reason: str = ""

    @property
    def approved(self) -> bool:
        """Nothing speaks against serving it but a pin."""
        return self.served or self.held_by_pin

    def row(self) -> dict[str, Any]:
        """For people: accuracies, and whether it was served."""

        def accuracy(result: Evaluation | None) -> float | None:
            return None if result is None else result.accuracy

        return {
            "model": self.model,
            "with_offset": accuracy(self.with_offset),
            "without_offset": accuracy(self.without_offset),
            "local": accuracy(self.local),
            "served": self.served,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Bundle:
    """A global model with the tensors of this site that belong to it."""

    number: int
    digest: str
    shared: Tensors
    personal: Tensors
    private: Tensors
    facts: dict[str, str]

    def task(self, name: str) -> RoundTask:
        """As a method's client half takes it."""
        return RoundTask(name, self.number, self.shared, self.personal, self.facts)


class StateFolder:
    """All that survives a restart."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, identity: Identity) -> None:
        """Start a new folder, for its owner's eyes only."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(self.path / "identity.json", identity.model_dump_json(indent=2).encode())

    @property
    def exists(self) -> bool:
        """Whether somebody has joined with this folder."""
        return (self.path / "identity.json").exists()

    def identity(self) -> Identity:
        """Who this agent is."""
        try:
            return Identity.model_validate_json((self.path / "identity.json").read_bytes())
        except FileNotFoundError as error:
            raise StateError(
                f"{self.path} holds no agent.",
                next_step="Run distrans-agent join first, or name its folder with --state.",
            ) from error
        except (ValidationError, OSError) as error:
            raise StateError(f"{self.path / 'identity.json'} cannot be read: {error}.") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one agent runs on a folder; the lock goes with the process, however it ends."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StateError(f"Another agent is running on {self.path}.", next_step="Stop it first.") from error
            yield
        finally:
            os.close(descriptor)

    # Private tensors and the upload in flight

    def private(self) -> Tensors:
        """The tensors that a method keeps at the agent; none before its first round."""
        return self._tensors(self.path / "private.safetensors")

    def stage_upload(self, pending: PendingUpload, body: bytes, private: Tensors) -> None:
        """Keep an update until the coordinator has acknowledged it; its private tensors do not count before that."""
        folder, aside = self.path / "pending", self.path / "pending.new"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        write_durably(aside / "update.safetensors", body)
        write_durably(aside / "private.safetensors", encode(private))
        write_durably(aside / "pending.json", pending.model_dump_json().encode())
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        sync_folder(self.path)

    def pending(self) -> tuple[PendingUpload, bytes] | None:
        """The update in flight, if any."""
        folder = self.path / "pending"
        try:
            pending = PendingUpload.model_validate_json((folder / "pending.json").read_bytes())
            return pending, (folder / "update.safetensors").read_bytes()
        except (FileNotFoundError, ValidationError):
            return None

    def commit_upload(self) -> None:
        """The coordinator has it: its private tensors count from now on. Doing so twice changes nothing."""
        staged = self.path / "pending" / "private.safetensors"
        if staged.exists():
            write_durably(self.path / "private.safetensors", staged.read_bytes())
        self.drop_upload()

    def drop_upload(self) -> None:
        """The update will never count."""
        shutil.rmtree(self.path / "pending", ignore_errors=True)
        sync_folder(self.path)

    # Models

    def save_bundle(self, bundle: Bundle, keep: int) -> None:
        """Keep a model, and of the older ones the newest `keep` and the pinned one."""
        models = self.path / "models"
        models.mkdir(mode=0o700, exist_ok=True)
        aside = models / f"{bundle.number}.new"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        write_durably(aside / "model.safetensors", encode(bundle.shared))
        write_durably(aside / "personal.safetensors", encode(bundle.personal))
        write_durably(aside / "private.safetensors", encode(bundle.private))
        about = {"number": bundle.number, "digest": bundle.digest, "facts": bundle.facts}
        write_durably(aside / "about.json", json.dumps(about).encode())
        shutil.rmtree(models / str(bundle.number), ignore_errors=True)
        aside.rename(models / str(bundle.number))
        sync_folder(models)
        pinned = self.pinned()
        for number in self.bundle_numbers()[:-keep]:
            if number != pinned:
                shutil.rmtree(models / str(number), ignore_errors=True)

    def bundle_numbers(self) -> list[int]:
        """The numbers of the models that are kept, oldest first."""
        models = self.path / "models"
        if not models.is_dir():
            return []
        return sorted(
            int(folder.name)
            for folder in models.iterdir()
            if (folder / "about.json").exists() and folder.name.isdigit()
        )

    def load_bundle(self, number: int) -> Bundle:
        """A model that is kept."""
        folder = self.path / "models" / str(number)
        try:
            about = json.loads((folder / "about.json").read_bytes())
            return Bundle(
                number,
                about["digest"],
                self._tensors(folder / "model.safetensors"),
                self._tensors(folder / "personal.safetensors"),
                self._tensors(folder / "private.safetensors"),
                about["facts"],
            )
        except (OSError, ValueError, KeyError) as error:
            kept = ", ".join(map(str, self.bundle_numbers())) or "none"
            raise StateError(f"Model {number} is not kept here.", next_step=f"Kept: {kept}.") from error

    def pinned(self) -> int | None:
        """The model that /predict is pinned to."""
        try:
            return int((self.path / "pin").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def pin(self, number: int | None) -> None:
        """Pin /predict to a model that is kept, or let it follow the newest again."""
        if number is None:
            (self.path / "pin").unlink(missing_ok=True)
        else:
            self.load_bundle(number)
            write_durably(self.path / "pin", str(number).encode())

    # What was measured

    def add_history(self, line: HistoryLine) -> None:
        """Add a line; a later one for the same model counts."""
        with (self.path / "history.jsonl").open("a") as handle:
            handle.write(line.model_dump_json() + "\n")
            handle.flush()
            os.fsync(handle.fileno())

    def history(self) -> list[HistoryLine]:
        """One line a model, in order; a line that a crash cut off is passed over."""
        lines: dict[int, HistoryLine] = {}
        try:
            for text in (self.path / "history.jsonl").read_text().splitlines():
                try:
                    line = HistoryLine.model_validate_json(text)
                except ValidationError:
                    continue
                lines[line.model] = line
        except FileNotFoundError:
            pass
        return [lines[number] for number in sorted(lines)]

    def baseline(self) -> Tensors:
        """The model trained on this site's data alone."""
        return self._tensors(self.path / "baseline.safetensors")

    def save_baseline(self, tensors: Tensors) -> None:
        """Keep the site's own model."""
        write_durably(self.path / "baseline.safetensors", encode(tensors))

    @staticmethod
    def _tensors(file: Path) -> Tensors:
        try:
            return safetensors.torch.load(file.read_bytes())
        except FileNotFoundError:
            return {}
        except SafetensorError as error:
            raise StateError(
                f"{file} is damaged: {error}.",
                next_step="Restore it from a backup, or delete it; docs/methods.md says what is then lost.",
            ) from error
