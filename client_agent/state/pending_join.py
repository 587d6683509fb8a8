"""A join under way, recorded on disk so that it can be repeated after any interruption."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client_agent.errors import StateError
from shared.system.files import locked, sync_folder, write_durably

_FILE = "join.json"


class PendingJoin(BaseModel):
    """A join that the coordinator may or may not have completed; the attempt lets the same site repeat it."""

    model_config = ConfigDict(frozen=True)
    attempt: str = Field(pattern=r"^[0-9a-f]{32}$")
    server: str
    name: str


@dataclass(frozen=True)
class Joining:
    """A join under way in a state folder."""

    folder: Path
    attempt: str
    is_repeat: bool  # of an interrupted join
    has_new_folder: bool

    def forget(self) -> None:
        """Undo what this join left on disk, since nothing was sent; keep the record of an earlier attempt."""
        if self.is_repeat:
            return
        forget_join(self.folder)
        if self.has_new_folder:
            with suppress(OSError):  # someone has put a file there in the meantime
                self.folder.rmdir()


@contextmanager
def joining(folder: Path, server: str, name: str) -> Iterator[Joining]:
    """Begin a join and record it first; raise StateError if the folder is taken, OSError if it cannot be written."""
    has_new_folder = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if has_new_folder:
        sync_folder(folder.parent)
    busy = StateError(f"Another join is under way in {folder}.", next_step="Wait until it ends.")
    with locked(folder, busy):  # not the file `lock`: root may join on behalf of the agent's user
        if (folder / "identity.json").exists():
            raise StateError(f"{folder} already holds an agent.", next_step="Use another --state folder.")
        known = _read(folder)
        pending = PendingJoin(attempt=known.attempt if known else secrets.token_hex(16), server=server, name=name)
        write_durably(folder / _FILE, pending.model_dump_json().encode())
        yield Joining(folder, pending.attempt, known is not None, has_new_folder)


def forget_join(folder: Path) -> None:
    """Remove the record of a join."""
    (folder / _FILE).unlink(missing_ok=True)


def _read(folder: Path) -> PendingJoin | None:
    try:
        return PendingJoin.model_validate_json((folder / _FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
