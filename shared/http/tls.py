"""HTTPS without a proxy: a certificate that is renewed while the service runs, and clients that show theirs."""

import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.problems import DistransError

if TYPE_CHECKING:
    from uvicorn import Config

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Tls:
    """PEM files: the chain, its key, and the authorities whose client certificates are asked for, if any."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def options(self) -> dict[str, Any]:
        """What uvicorn has to be told."""
        return {
            "ssl_certfile": self.cert,
            "ssl_keyfile": self.key,
            "ssl_ca_certs": self.client_ca,
            "ssl_cert_reqs": ssl.CERT_NONE if self.client_ca is None else ssl.CERT_REQUIRED,
            "ssl_context_factory": reloading_context,
        }

    def check(self) -> None:
        """Refuse files that cannot be used, before anybody waits for a connection."""
        try:
            _try(self.cert, self.key)
        except OSError as error:  # also ssl.SSLError
            raise DistransError(
                f"{self.cert} and {self.key} cannot be used: {error.strerror or error}.",
                next_step="Give --tls-cert and --tls-key PEM files that belong together.",
            ) from error
        if self.client_ca is not None:
            try:
                ssl.create_default_context(cafile=self.client_ca)
            except OSError as error:
                raise DistransError(
                    f"{self.client_ca} cannot be used: {error.strerror or error}.",
                    next_step="Give --tls-client-ca a PEM file with the authorities of the clients' certificates.",
                ) from error


def reloading_context(config: "Config", default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context for uvicorn, in each of its processes, that takes up the files of its certificate when they change."""
    context = default()
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        cert, key = Path(config.ssl_certfile), Path(config.ssl_keyfile)
        threading.Thread(target=_watch, args=(context, cert, key), name="certificates", daemon=True).start()
    return context


def _watch(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    seen = _versions(cert, key)
    pause = threading.Event()
    while not pause.wait(_LOOK_EVERY_S):
        found = _versions(cert, key)
        if found == seen:
            continue
        seen = found
        try:
            _try(cert, key)  # a half-written pair must not get into the context that serves
            context.load_cert_chain(cert, key)
        except OSError as error:
            logger.error("the new certificate in %s cannot be used, the old one stays in use: %s", cert, error)
        else:
            logger.info("the certificate in %s was renewed", cert)


def _versions(*files: Path) -> list[tuple[int, int, int] | None]:
    return [_version(file) for file in files]


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()  # follows the links that certificate managers swap
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _try(cert: Path, key: Path) -> None:
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password=_no_password)


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted; a server that starts by itself cannot ask for its password")
