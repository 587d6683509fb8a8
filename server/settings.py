"""The settings of one coordinator process, built by the command line and passed to `create_app`."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from server.service.housekeeping import Retention
from server.service.tokens import new_secret
from shared.problems import DistransError

DEFAULT_DATA_DIR = Path("distrans-data")
ADMIN_TOKEN_FILE = "admin-token"  # noqa: S105 - a file's name
MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True)
class Settings:
    """Frozen; one per process."""

    db_url: str
    admin_token: str = field(repr=False)
    scrape_token: str | None = field(default=None, repr=False)
    retention: Retention = field(default_factory=Retention)
    max_json_bytes: int = 8 * 1024 * 1024
    poll_interval_s: float = 0.25  # how soon a change made by another replica is seen


def default_db_url(data_dir: Path = DEFAULT_DATA_DIR) -> str:
    """The embedded SQLite database."""
    return f"sqlite:///{data_dir / 'distrans.db'}"


def find_admin_token(data_dir: Path, *, create: bool) -> tuple[str, Path | None]:
    """The admin token from DISTRANS_ADMIN_TOKEN, DISTRANS_ADMIN_TOKEN_FILE or the data folder; (token, new file).

    With `create`, one that is nowhere to be found is made and written where only its owner can read it.
    """
    if token := os.environ.get("DISTRANS_ADMIN_TOKEN"):
        return _checked(token, "DISTRANS_ADMIN_TOKEN"), None
    named = os.environ.get("DISTRANS_ADMIN_TOKEN_FILE")
    file = Path(named) if named else data_dir / ADMIN_TOKEN_FILE
    try:
        return _checked(file.read_text().strip(), str(file)), None
    except FileNotFoundError as error:
        if named or not create:
            raise DistransError(
                f"There is no admin token: {file} does not exist.",
                next_step="Set DISTRANS_ADMIN_TOKEN, or DISTRANS_ADMIN_TOKEN_FILE to a file that holds it.",
            ) from error
    except OSError as error:
        raise DistransError(f"The admin token in {file} cannot be read: {error.strerror}.") from error
    token = new_secret()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process was first
        return find_admin_token(data_dir, create=False)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(token + "\n")
    return token, file


def _checked(token: str, where: str) -> str:
    if len(token) < MIN_TOKEN_LENGTH:
        raise DistransError(
            f"The admin token in {where} has fewer than {MIN_TOKEN_LENGTH} characters.",
            next_step="Use a long random one, for example from: openssl rand -base64 32",
        )
    return token
