"""The agent's folder: identity, private tensors, the upload in flight, the last models, and what was measured.

identity.json            who it is (0600)
join.json                a join that was begun, until identity.json is there (0600)
private.safetensors      tensors that a method keeps at the site, such as the offset
pending/                 an upload not yet acknowledged, with the private tensors that go with it
models/                  the last models, see kept_models.py
baseline.safetensors     the model trained on this site's data alone (--local-baseline)
history.jsonl            what the gate decided about each model, see history.py
pin                      number and fingerprint of the model that /predict is pinned to, if any
condition.json           what the agent serves, what troubles it and how its loop ended, for `status`
lock                     held by the running agent
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client_agent.condition import Report
from client_agent.errors import StateError
from client_agent.history import HistoryLine, append_line, compact, read_lines
from client_agent.kept_models import Bundle, KeptModel, KeptModels, load_tensors
from client_agent.settings import Identity
from shared.files import sync_folder, write_durably
from shared.methods.base import Tensors
from shared.wire import encode

_MAX_DIGITS = 18
_LOCK_WAIT_S = 0.2


class PendingUpload(BaseModel):
    """An update that the coordinator may or may not have."""

    model_config = ConfigDict(frozen=True)
    round_id: int
    round_number: int
    digest: str


class PendingJoin(BaseModel):
    """A join that the coordinator may or may not have carried out; the attempt lets the same site repeat it."""

    model_config = ConfigDict(frozen=True)
    attempt: str = Field(pattern=r"^[0-9a-f]{32}$")
    server: str
    name: str


@dataclass(frozen=True)
class Joining:
    """A join under way."""

    attempt: str
    is_repeat: bool  # of one that was interrupted
    has_new_folder: bool


class StateFolder:
    """All that survives a restart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._models = KeptModels(path / "models")

    @contextmanager
    def joining(self, server: str, name: str) -> Iterator[Joining]:
        """Begin a join, and put that on the disk first: whatever interrupts it, it can be repeated.

        A folder that cannot be written raises OSError at once.
        """
        has_new_folder = not self.path.exists()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if has_new_folder:
            sync_folder(self.path.parent)
        descriptor = os.open(self.path, os.O_RDONLY)  # not the file `lock`: root may join for the agent's user
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StateError(
                    f"Another join is under way in {self.path}.", next_step="Wait until it ends."
                ) from error
            if self.exists:
                raise StateError(f"{self.path} holds an agent already.", next_step="Use another --state folder.")
            known = self._pending_join()
            pending = PendingJoin(attempt=known.attempt if known else secrets.token_hex(16), server=server, name=name)
            write_durably(self.path / "join.json", pending.model_dump_json().encode())
            yield Joining(pending.attempt, known is not None, has_new_folder)
        finally:
            os.close(descriptor)

    def _pending_join(self) -> PendingJoin | None:
        try:
            return PendingJoin.model_validate_json((self.path / "join.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def forget_join(self, joining: Joining) -> None:
        """Nothing was sent: leave the disk as it was. What an earlier attempt may have sent is not forgotten."""
        if joining.is_repeat:
            return
        (self.path / "join.json").unlink(missing_ok=True)
        if joining.has_new_folder:
            with suppress(OSError):  # somebody has put something into it meanwhile
                self.path.rmdir()

    def create(self, identity: Identity) -> None:
        """Start a new folder, readable by its owner alone."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.save_identity(identity)
        (self.path / "join.json").unlink(missing_ok=True)

    def save_identity(self, identity: Identity) -> None:
        """Replace who this agent is, in one step."""
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

    def identity_version(self) -> tuple[int, ...]:
        """Changes whenever identity.json is replaced."""
        about = (self.path / "identity.json").stat()
        return about.st_ino, about.st_mtime_ns, about.st_size

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one agent runs on a folder; the lock goes with the process, however it ends."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            descriptor = os.open(self.path / "lock", os.O_RDONLY)  # a disk that has failed can still be served from
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        give_up_at = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= give_up_at:
                    raise StateError(f"Another agent is running on {self.path}.", next_step="Stop it first.") from error
                time.sleep(0.02)  # `is_running` holds it for a moment
            else:
                return

    def is_running(self) -> bool:
        """Whether an agent runs on this folder now."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY)
        except OSError:  # never run, or another user's, who alone can read the rest
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    # Private tensors and the upload in flight

    def private(self) -> Tensors:
        """The tensors that a method keeps at the agent; none before its first round."""
        return load_tensors(self.path / "private.safetensors")

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

    def save_bundle(self, bundle: Bundle, keep: int, served: tuple[int, str, str] | None = None) -> None:
        """Keep a model; of all of them the last `keep`, the pinned one, the first choice, and the one that is served.

        The served one, by number, digest and fingerprint, is not the first choice when that one is damaged.
        """
        self._models.save(bundle)
        protected = self.choices()[: 1 if self._pin() is None else 2]
        if served is not None:
            protected += [one for one in self._models.all() if one.holds(*served)]
        self._models.prune(keep, protected)

    def kept_models(self) -> list[KeptModel]:
        """The models that are kept, in the order of their arrival."""
        return self._models.all()

    def bundle_numbers(self) -> list[int]:
        """The numbers of the models that are kept, in the order of their arrival."""
        return list(dict.fromkeys(kept.number for kept in self._models.all()))

    def load(self, kept: KeptModel) -> Bundle:
        """A model that is kept."""
        return self._models.load(kept)

    def load_bundle(self, number: int) -> Bundle:
        """The kept model of this number; of several the last that was approved, else the last that arrived."""
        return self._models.load(self._find(number))

    def _find(self, number: int) -> KeptModel:
        for kept in [*self._approved(), *reversed(self._models.all())]:
            if kept.number == number:
                return kept
        numbers = ", ".join(map(str, self.bundle_numbers())) or "none"
        raise StateError(f"Model {number} is not kept here.", next_step=f"Kept: {numbers}.")

    def choices(self) -> list[KeptModel]:
        """The kept models that may be served, first choice first.

        The pinned one, then those that the gate approved, the latest decision first. A model without a decision is
        never among them.
        """
        approved = self._approved()
        return list(dict.fromkeys(self._pinned_model(approved) + approved))

    def first_choice(self) -> KeptModel | None:
        """The first of the choices whose files are intact: the one that an agent started now would serve."""
        return next((kept for kept in self.choices() if self._models.is_intact(kept)), None)

    def has_pinned(self) -> bool:
        """Whether the very model that /predict is pinned to is kept."""
        return bool(self._pinned_model(self._approved()))

    def _pinned_model(self, approved: list[KeptModel]) -> list[KeptModel]:
        pin = self._pin()
        if pin is None:
            return []
        number, fingerprint = pin
        named = [one for one in [*approved, *reversed(self._models.all())] if one.number == number]
        exact = [one for one in named if one.fingerprint == fingerprint]
        # A pin without a fingerprint is an older agent's, and about a folder of such an agent as long as there is one.
        return (exact if exact or fingerprint else named)[:1]

    def _approved(self) -> list[KeptModel]:
        kept = self._models.all()
        return [one for line in reversed(self.history()) if line.approved for one in kept if _is_about(line, one)]

    def decision(self, kept: KeptModel) -> HistoryLine | None:
        """What the gate decided about a kept model."""
        return next((line for line in reversed(self.history()) if _is_about(line, kept)), None)

    def best_approved(self) -> HistoryLine | None:
        """The approved line with the highest score among the kept models; without any, the last one with a score.

        Not the last one of the kept: models could then get worse step by step, each by less than the gate allows.
        """
        scored = [line for line in self.history() if line.approved and line.with_offset is not None]
        kept = self._models.all()
        among = [line for line in scored if any(_is_about(line, one) for one in kept)] or scored[-1:]
        return max(among, key=lambda line: (line.with_offset and line.with_offset.accuracy) or 0.0, default=None)

    def pinned(self) -> int | None:
        """The number of the model that /predict is pinned to; None also when the pin cannot be read."""
        pin = self._pin()
        return None if pin is None else pin[0]

    def _pin(self) -> tuple[int, str] | None:
        """Number and fingerprint, which is empty for what an older agent wrote."""
        try:
            number, _, fingerprint = self.pin_text().strip().partition(" ")
        except OSError:  # the gate reports it; approved models can still be served
            return None
        is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
        return (int(number), fingerprint) if is_number else None

    def pin_text(self) -> str:
        """Whatever stands in the pin's file; changes when the pin does. Raises OSError when it cannot be read."""
        try:
            return (self.path / "pin").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def pin(self, number: int | None) -> None:
        """Pin /predict to a model that is kept, or let it follow the newest again."""
        if number is None:
            (self.path / "pin").unlink(missing_ok=True)
            sync_folder(self.path)
        else:
            kept = self._find(number)
            self._models.load(kept)
            write_durably(self.path / "pin", f"{kept.number} {kept.fingerprint}".encode())

    # What was measured, and how the agent is

    def add_history(self, line: HistoryLine) -> None:
        """Add a decision; a later one about the same model replaces it. Of thousands the oldest are dropped."""
        file, kept = self.path / "history.jsonl", self._models.all()
        compact(file, lambda old: old.approved and any(_is_about(old, one) for one in kept))
        append_line(file, line)

    def history(self) -> list[HistoryLine]:
        """The last decision about each model, oldest first."""
        return read_lines(self.path / "history.jsonl")

    def save_condition(self, report: Report) -> None:
        """Keep what `status` shows about the running agent, or about its last run."""
        write_durably(self.path / "condition.json", report.model_dump_json().encode())

    def condition(self) -> Report:
        """What the agent last said about itself."""
        try:
            return Report.model_validate_json((self.path / "condition.json").read_bytes())
        except (OSError, ValidationError):
            return Report()

    def baseline(self) -> Tensors:
        """The model trained on this site's data alone."""
        return load_tensors(self.path / "baseline.safetensors")

    def save_baseline(self, tensors: Tensors) -> None:
        """Keep the site's own model."""
        write_durably(self.path / "baseline.safetensors", encode(tensors))


def _is_about(line: HistoryLine, kept: KeptModel) -> bool:
    # A line of an older agent has neither digest nor fingerprint, and is about a folder that such an agent wrote.
    return line.model == kept.number and line.fingerprint == kept.fingerprint and line.digest in ("", kept.digest)
