"""The agent's state folder: everything that survives a restart.

identity.json            which client this is (0600)
join.json                an unfinished join, until identity.json exists (0600); see pending_join.py
private.safetensors      what a method keeps at the site, such as the offset, and what compressed updates left out
pending/                 an update not yet acknowledged, with its private tensors
models/                  the last models; see kept_models.py
history.jsonl            the gate's decisions; see decisions.py
pin                      number, fingerprint and candidate of the pinned model, if any; see servable_models.py
alone.safetensors        the model trained only on this site's images, and how many steps it has taken
adapted.safetensors      the newest model, fine-tuned on this site's images; see own_models.py for both
prior.json               which class frequencies /predict assumes, from the options of the last run
condition.json           what `status` shows: the served model, troubles, how the loop ended
lock                     held by the running agent
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from client_agent.errors import StateError
from client_agent.settings import SITE_PRIOR, Identity, ServedPrior
from client_agent.state.kept_models import load_tensors
from client_agent.state.own_models import OwnModels
from client_agent.state.pending_join import forget_join
from client_agent.state.servable_models import ModelStore
from client_agent.status import StatusSnapshot
from shared.learning.residuals import without_residual
from shared.system.files import is_locked, locked, sync_folder, write_durably
from shared.tensors.names import Tensors
from shared.tensors.wire import encode

_LOCK_WAIT_S = 0.2  # `is_running` holds the lock for a moment


class PendingUpload(BaseModel):
    """An update that the coordinator may or may not have received."""

    model_config = ConfigDict(frozen=True)
    round_id: int
    round_number: int
    digest: str
    url: str = ""  # missing from files of older agents

    @property
    def target(self) -> str:
        """Where to upload it."""
        return self.url or f"/v1/rounds/{self.round_id}/update"


class StateFolder:
    """An agent's durable state; `models` holds the models it may serve, `own` those it trains for itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models = ModelStore(path)
        self.own = OwnModels(path)

    # Identity

    def create(self, identity: Identity) -> None:
        """Store the identity in a folder readable only by its owner; this completes a join."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.save_identity(identity)
        forget_join(self.path)

    def save_identity(self, identity: Identity) -> None:
        """Replace the identity atomically."""
        write_durably(self.path / "identity.json", identity.model_dump_json(indent=2).encode())

    def identity(self) -> Identity:
        """Return the identity; raise StateError if there is none or it cannot be read."""
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
        """Return a value that changes whenever identity.json is replaced."""
        about = (self.path / "identity.json").stat()
        return about.st_ino, about.st_mtime_ns, about.st_size

    # The lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other agents off the folder; raise StateError if one is running on it."""
        busy = StateError(f"Another agent is running on {self.path}.", next_step="Stop it first.")
        with locked(self.path / "lock", busy, wait_s=_LOCK_WAIT_S):
            yield

    def is_running(self) -> bool:
        """Return whether an agent is running on this folder now."""
        return is_locked(self.path / "lock")

    # Private tensors and the pending upload

    def private(self) -> Tensors:
        """Return the tensors that a method keeps at the site; none before its first round."""
        return without_residual(self.kept())

    def kept(self) -> Tensors:
        """Return the private tensors with what compressed updates have left out so far."""
        return load_tensors(self.path / "private.safetensors")

    def stage_upload(self, pending: PendingUpload, body: bytes, kept: Tensors) -> None:
        """Store an update until the coordinator acknowledges it; its private tensors take effect only then."""
        folder, staging = self.path / "pending", self.path / "pending.new"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
        write_durably(staging / "update.safetensors", body)
        write_durably(staging / "private.safetensors", encode(kept))
        write_durably(staging / "pending.json", pending.model_dump_json().encode())
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
        sync_folder(self.path)

    def pending(self) -> tuple[PendingUpload, bytes] | None:
        """Return the unacknowledged update and its body, if there is one."""
        folder = self.path / "pending"
        try:
            pending = PendingUpload.model_validate_json((folder / "pending.json").read_bytes())
            return pending, (folder / "update.safetensors").read_bytes()
        except (FileNotFoundError, ValidationError):
            return None

    def commit_upload(self) -> None:
        """Adopt the private tensors of an acknowledged update. Idempotent."""
        staged = self.path / "pending" / "private.safetensors"
        if staged.exists():
            write_durably(self.path / "private.safetensors", staged.read_bytes())
        self.drop_upload()

    def drop_upload(self) -> None:
        """Discard an update that will never count."""
        shutil.rmtree(self.path / "pending", ignore_errors=True)
        sync_folder(self.path)

    # Status and prior

    def save_status(self, report: StatusSnapshot) -> None:
        """Store the status for the `status` command."""
        write_durably(self.path / "condition.json", report.model_dump_json().encode())

    def load_status(self) -> StatusSnapshot:
        """Return the status that the agent last stored."""
        try:
            return StatusSnapshot.model_validate_json((self.path / "condition.json").read_bytes())
        except (OSError, ValidationError):
            return StatusSnapshot()

    def save_prior(self, prior: ServedPrior) -> None:
        """Store the prior of this run, for `predict` and `export`."""
        write_durably(self.path / "prior.json", prior.model_dump_json().encode())

    def load_prior(self) -> ServedPrior:
        """Return the prior of the last run; the default if there was none."""
        try:
            return ServedPrior.model_validate_json((self.path / "prior.json").read_bytes())
        except FileNotFoundError:
            return SITE_PRIOR
        except (OSError, ValidationError) as error:
            raise StateError(
                f"{self.path / 'prior.json'} cannot be read: {error}.",
                next_step="The next distrans-agent run replaces it.",
            ) from error
