"""The settings of one coordinator process, built by the command line and passed to `create_app`."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from server.service.cleaning import Retention
from server.service.tokens import new_secret
from server.store.session import DatabaseOptions
from shared.environment import secret
from shared.problems import DistransError

DEFAULT_DATA_DIR = Path("distrans-data")
ADMIN_TOKEN_FILE = "admin-token"  # noqa: S105 - a file's name
MIN_TOKEN_LENGTH = 16
# Fields of `Settings` that variables may set: DISTRANS_ and the name in capitals.
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
    """Frozen; one per process."""

    db_url: str
    admin_token: str = field(repr=False)
    scrape_token: str | None = field(default=None, repr=False)
    blobs: str | None = None  # s3://bucket/prefix; None: in the database
    database: DatabaseOptions = field(default_factory=DatabaseOptions)
    retention: Retention = field(default_factory=Retention)
    max_json_bytes: int = 8 * 1024 * 1024
    json_body_s: float = 30.0  # a JSON body has to be there by then
    requests_per_s: float = 100.0  # of one caller or unknown address, in each process; 0: any number
    uploads_per_client: int = 4  # under way in each process; 0: any number
    downloads_per_client: int = 4  # likewise
    polls_per_client: int = 4  # likewise; a newer one ends the oldest
    history_reads_per_client: int = 2  # likewise: rounds, metrics, heterogeneity, lists of federations
    max_connections: int = 0  # open in each process; 0: as many as its open files allow
    connections_per_address: int = 0  # open in each process; 0: half of all
    admin_networks: tuple[str, ...] = ()  # where the admin token is taken from; none: anywhere
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks that may say whom they speak for
    client_certificate_header: str | None = None  # where trusted proxies put the caller's certificate
    root_path: str = ""  # the prefix that a proxy serves the coordinator under
    cors_origins: tuple[str, ...] = ()  # web pages of other hosts that may call
    poll_interval_s: float = 0.25  # how soon a change made by another replica is seen


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `Settings` that are set by variables alone, checked."""
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
                raise DistransError(f"{variable} is {text!r}, which is not a number.") from error
            if not 0 <= fields[name] < 1e9:  # also what is not a number
                raise DistransError(f"{variable} is {text!r}; it must be 0 (the default, or no limit) or more.")
    return fields


def _list(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return split_list(environment.get(variable, ""))


def split_list(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check_networks(networks: tuple[str, ...], where: str) -> None:
    """Addresses and networks, or an error that names the first that is neither."""
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise DistransError(
                f"{where}: {network!r} is neither an address nor a network.",
                next_step="For example 10.0.0.0/8,192.0.2.7",
            ) from error


def check_root_path(path: str) -> str:
    """A prefix like /federated, without the slash at its end."""
    if path and not path.startswith("/"):
        raise DistransError(f"--root-path {path!r} does not begin with a slash.")
    return path.rstrip("/")


def default_db_url(data_dir: Path = DEFAULT_DATA_DIR) -> str:
    """The embedded SQLite database."""
    return f"sqlite:///{data_dir / 'distrans.db'}"


def with_password(db_url: str) -> str:
    """The address with the password in the file that DISTRANS_DB_PASSWORD_FILE names, unless it has one already."""
    password = secret("DISTRANS_DB_PASSWORD")
    if password is None or "://" not in db_url or make_url(db_url).password is not None:
        return db_url
    return make_url(db_url).set(password=password).render_as_string(hide_password=False)


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
