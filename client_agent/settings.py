"""An agent's settings: its identity, fixed at `join`, and the options of one run."""

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.contract.errors import DistransError
from shared.contract.plan import StoredPlan
from shared.http.client_connection import Connection, is_loopback
from shared.http.server_tls import Tls

if TYPE_CHECKING:
    from shared.learning.runtime import Precision

DEFAULT_CACHE_BYTES = 2 * 1024**3
HAS_LEFT = "This site has left the federation."
_HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)


class SkippedData(BaseModel):
    """Files and classes that `join --skip-bad` left out; `run` leaves out the same ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    files: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


NOTHING_SKIPPED = SkippedData()


class Identity(BaseModel):
    """Which client this agent is. Written by `join` with mode 0600; `token` and `leave` replace it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    client_id: str
    name: str
    token: str = Field(repr=False)
    federation: str
    plan: StoredPlan
    connection: Connection
    data: str
    skip_bad: bool = False
    skipped: SkippedData = NOTHING_SKIPPED
    class_map: dict[str, str] = {}
    withhold_class_counts: bool = False
    has_left: bool = False


PriorKind = Literal["site", "none", "deployment"]


class ServedPrior(BaseModel):
    """Which class frequencies `/predict` assumes: the site's, the federation's (`none`), or those of a deployment."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: PriorKind = "site"
    frequencies: dict[str, float] = {}  # of a deployment, by class; relative, so they need not add up to anything
    only_own_classes: bool = False


SITE_PRIOR = ServedPrior()


@dataclass(frozen=True)
class ServeOptions:
    """Options and limits of the site's web service."""

    host: str = "127.0.0.1"
    port: int = 8500
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    allowed_hosts: tuple[str, ...] = ()  # names that callers may use besides the host itself
    allow_open_predict: bool = False
    allow_offset_override: bool = False
    max_images: int = 32
    max_body_bytes: int = 32 * 1024 * 1024
    max_held_bytes: int = 128 * 1024 * 1024  # all unanswered requests together
    body_s: float = 30.0
    max_pixels: int = 25_000_000  # per image
    max_request_pixels: int = 50_000_000
    max_connections: int = 512  # at most half from one address; lowered if the process may open few files
    queue: int = 64
    threads: int = 1

    def check(self) -> None:
        """Raise DistransError for options that expose /predict by accident or cannot work."""
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.split()):
            raise DistransError(
                "The predict token is empty or has characters that an HTTP header cannot hold.",
                next_step="Use letters and digits, for example from openssl rand -hex 32.",
            )
        if self.token is None and not is_loopback(self.host) and not self.allow_open_predict:
            raise DistransError(
                f"--host {self.host} opens /predict to the network without a token.",
                next_step="Set DISTRANS_PREDICT_TOKEN or DISTRANS_PREDICT_TOKEN_FILE, "
                "or pass --allow-open-predict to serve anyone.",
            )
        for host in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(host) and not _is_address(host):
                raise DistransError(
                    f"--allowed-host {host!r} is not a host name or an address.",
                    next_step="Leave out scheme, port and path: agent.example.org",
                )
        if self.tls is not None:
            self.tls.check()

    def risks(self) -> list[str]:
        """Return warnings about who can reach the service, and how."""
        if is_loopback(self.host):
            return []
        risks = []
        if self.token is None:
            risks.append(f"/predict on {self.host} has no token: anyone who can reach it gets predictions")
        if self.tls is None:
            risks.append(
                f"/predict on {self.host} is not encrypted: anyone on the network path can read images and the token; "
                "use --tls-cert and --tls-key, or put an HTTPS proxy in front of it"
            )
        return risks


Adaptation = Literal["whole", "head", "off"]
SharedVerdict = Literal["none", "counts", "full"]


@dataclass(frozen=True)
class RunOptions:
    """Options of one run of the agent."""

    train: bool = True
    serve: ServeOptions | None = ServeOptions()
    device: str = "auto"
    precision: "Precision" = "fp32"
    channels_last: bool = False
    compile: bool = False
    train_threads: int | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    keep_models: int = 5
    max_accuracy_drop: float | None = 0.1
    alone: bool = True
    adapt: Adaptation = "whole"
    adapt_epochs: int = 10
    prior: ServedPrior = SITE_PRIOR
    share_verdict: SharedVerdict = "counts"
    exit_when_finished: bool = False


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
