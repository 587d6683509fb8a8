"""Settings of one coordinator process, built by the command line and passed to `create_app`."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from server.service.retention import Retention
from server.service.token_format import new_admin_token
from server.store.database import DatabaseOptions
from shared.contract.errors import DistransError
from shared.system.secrets import secret

ADMIN_TOKEN_FILE = "admin-token"  # noqa: S105 - a file's name
MIN_TOKEN_LENGTH = 16
# Fields of `Settings` that can be set by variables: DISTRANS_ plus the name in capitals.
_NUMBERS: dict[str, type[int] | type[float]] = {
    "requests_per_s": float,
    "uploads_per_client": int,
    "downloads_per_client": int,
    "polls_per_client": int,
    "history_reads_per_client": int,
    "max_connections": int,
    "connections_per_address": int,
}


@dataclass(frozen=True)
class Settings:
    """Settings of one process. Limits apply per process."""

    db_url: str
    admin_token: str = field(repr=False)
    scrape_token: str | None = field(default=None, repr=False)
    viewer_token: str | None = field(default=None, repr=False)  # may look at the dashboard, but not act
    blobs: str | None = None  # s3://bucket/prefix (None = in the database)
    database: DatabaseOptions = field(default_factory=DatabaseOptions)
    retention: Retention = field(default_factory=Retention)
    max_json_bytes: int = 8 * 1024 * 1024
    json_body_s: float = 30.0  # to receive a whole JSON body
    requests_per_s: float = 100.0  # per caller or unknown address (0 = unlimited)
    uploads_per_client: int = 4  # concurrent (0 = unlimited)
    downloads_per_client: int = 4  # concurrent (0 = unlimited)
    polls_per_client: int = 4  # concurrent (0 = unlimited); a new one ends the oldest
    history_reads_per_client: int = 2  # concurrent: rounds, metrics, heterogeneity, federation lists
    max_connections: int = 0  # open (0 = as many as the file limit allows)
    connections_per_address: int = 0  # open (0 = half of all)
    admin_networks: tuple[str, ...] = ()  # where the admin token is accepted from (empty = anywhere)
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks whose forwarding headers are trusted
    client_certificate_header: str | None = None  # set by trusted proxies to the caller's certificate
    root_path: str = ""  # path prefix under which a proxy serves the coordinator
    cors_origins: tuple[str, ...] = ()  # other web origins that may call the API
    poll_interval_s: float = 0.25  # delay until changes by another replica are noticed


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `Settings` that are set by environment variables only, validated."""
    fields: dict[str, Any] = {
        "blobs": environment.get("DISTRANS_BLOBS") or None,
        "admin_networks": _list(environment, "DISTRANS_ADMIN_NETWORKS"),
        "cors_origins": _list(environment, "DISTRANS_CORS_ORIGINS"),
        "client_certificate_header": environment.get("DISTRANS_CLIENT_CERTIFICATE_HEADER") or None,
    }
    check_networks(fields["admin_networks"], "DISTRANS_ADMIN_NETWORKS")
    for name, kind in _NUMBERS.items():
        variable = f"DISTRANS_{name.upper()}"
        if text := environment.get(variable):
            try:
                fields[name] = kind(text)
            except ValueError as error:
                raise DistransError(f"{variable} is {text!r}; it must be a number.") from error
            if not 0 <= fields[name] < 1e9:  # also rejects NaN
                raise DistransError(f"{variable} is {text!r}; it must be 0 (the default, or no limit) or more.")
    return fields


def _list(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return split_list(environment.get(variable, ""))


def split_list(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_networks(networks: tuple[str, ...], where: str) -> None:
    """Raise unless every entry is an IP address or network."""
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise DistransError(
                f"{where}: {network!r} is not an IP address or network.",
                next_step="Example: 10.0.0.0/8,192.0.2.7",
            ) from error


def check_root_path(path: str) -> str:
    """Return the path prefix without a trailing slash; raise unless it starts with one."""
    if path and not path.startswith("/"):
        raise DistransError(f"--root-path {path!r} must start with a slash.")
    return path.rstrip("/")


def default_db_url(data_dir: Path) -> str:
    """Return the URL of the embedded SQLite database."""
    return f"sqlite:///{data_dir / 'distrans.db'}"


def with_password(db_url: str) -> str:
    """Add the password from DISTRANS_DB_PASSWORD or DISTRANS_DB_PASSWORD_FILE to a URL without one."""
    password = secret("DISTRANS_DB_PASSWORD")
    if password is None or "://" not in db_url or make_url(db_url).password is not None:
        return db_url
    return make_url(db_url).set(password=password).render_as_string(hide_password=False)


def find_admin_token(data_dir: Path, *, create: bool) -> tuple[str, Path | None]:
    """Find the admin token in DISTRANS_ADMIN_TOKEN, DISTRANS_ADMIN_TOKEN_FILE or the data folder.

    With `create`, generate a missing one and write it to a file that only its owner can read. Return (token, new file).
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
                f"No admin token: {file} does not exist.",
                next_step="Set DISTRANS_ADMIN_TOKEN, or DISTRANS_ADMIN_TOKEN_FILE to a file that holds it.",
            ) from error
    except OSError as error:
        raise DistransError(f"Cannot read the admin token in {file}: {error.strerror}.") from error
    token = new_admin_token()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process got there first
        return find_admin_token(data_dir, create=False)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(token + "\n")
    return token, file


def check_viewer_token(token: str | None, admin_token: str) -> str | None:
    """Return the viewer token, if there is one; raise if it is short, or also the admin token."""
    if token is not None and token == admin_token:
        raise DistransError(
            "DISTRANS_VIEWER_TOKEN is the admin token.",
            next_step="Generate another one with: openssl rand -base64 32",
        )
    return None if token is None else _checked(token, "DISTRANS_VIEWER_TOKEN", "viewer")


def _checked(token: str, where: str, whose: str = "admin") -> str:
    if len(token) < MIN_TOKEN_LENGTH:
        raise DistransError(
            f"The {whose} token in {where} has fewer than {MIN_TOKEN_LENGTH} characters.",
            next_step="Generate one with: openssl rand -base64 32",
        )
    return token
