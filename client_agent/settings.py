"""What an agent is told once, at `join`, and what may change from run to run."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from client_agent.data import DEFAULT_CACHE_BYTES
from shared.plan import StoredPlan
from shared.problems import DistransError
from shared.runtime import Precision


class Connection(BaseModel):
    """How to reach the coordinator."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    server: str
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    allow_insecure_http: bool = False

    def check(self) -> None:
        """Refuse to send tokens and models in the clear over a network."""
        parts = urlsplit(self.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DistransError(f"{self.server!r} is no web address.", next_step="Use https://host[:port].")
        if parts.scheme == "http" and not self.allow_insecure_http and not _is_loopback(parts.hostname):
            raise DistransError(
                f"{self.server} is not encrypted: anybody on the way could read the token and the models.",
                next_step="Use https://, or --allow-insecure-http if the network is trusted.",
            )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Identity(BaseModel):
    """Who this agent is; written at `join`, with mode 0600."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    client_id: str
    name: str
    token: str = Field(repr=False)
    federation: str
    plan: StoredPlan
    connection: Connection
    data: str
    skip_bad: bool = False


@dataclass(frozen=True)
class ServeOptions:
    """The site's own web server."""

    host: str = "127.0.0.1"
    port: int = 8500
    token: str | None = None
    allow_offset_override: bool = False
    max_images: int = 32
    max_body_bytes: int = 32 * 1024 * 1024
    max_pixels: int = 25_000_000
    queue: int = 64
    threads: int = 1


@dataclass(frozen=True)
class RunOptions:
    """How one run of the agent works."""

    train: bool = True
    serve: ServeOptions | None = ServeOptions()
    device: str = "auto"
    precision: Precision = "fp32"
    channels_last: bool = False
    compile: bool = False
    train_threads: int | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    keep_models: int = 5
    max_accuracy_drop: float | None = 0.1
    local_baseline: bool = False
    exit_when_finished: bool = False
    progress: bool | None = None


def expand(path: Path | None) -> str | None:
    """A path that still holds when the agent is started from another folder."""
    return None if path is None else str(path.expanduser().resolve())
