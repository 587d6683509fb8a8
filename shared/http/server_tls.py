"""HTTPS without a proxy: certificates that can be renewed while the service runs, and client certificates."""

import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.contract.errors import DistransError

if TYPE_CHECKING:
    from uvicorn import Config

logger = logging.getLogger(__name__)
_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Tls:
    """PEM files: certificate chain, its key, and the authorities that sign client certificates, if required."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def options(self) -> dict[str, Any]:
        """Return the options for uvicorn."""
        return {
            "ssl_certfile": self.cert,
            "ssl_keyfile": self.key,
            "ssl_ca_certs": self.client_ca,
            "ssl_cert_reqs": ssl.CERT_NONE if self.client_ca is None else ssl.CERT_REQUIRED,
            "ssl_context_factory": reloading_context,
        }

    def check(self) -> None:
        """Raise if one of the files cannot be used; call it before the service starts."""
        try:
            _try(self.cert, self.key)
        except OSError as error:  # also ssl.SSLError
            raise DistransError(
                f"{self.cert} and {self.key} cannot be used: {error.strerror or error}.",
                next_step="Pass a PEM certificate chain with --tls-cert and its key with --tls-key.",
            ) from error
        if self.client_ca is not None:
            try:
                ssl.create_default_context(cafile=self.client_ca)
            except OSError as error:
                raise DistransError(
                    f"{self.client_ca} cannot be used: {error.strerror or error}.",
                    next_step="Pass a PEM file with the authorities that sign client certificates to --tls-client-ca.",
                ) from error


def reloading_context(config: "Config", default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a TLS context for one of uvicorn's processes that reloads its certificate when the files change."""
    context = default()
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        cert, key = Path(config.ssl_certfile), Path(config.ssl_keyfile)
        threading.Thread(target=_watch, args=(context, cert, key), name="certificates", daemon=True).start()
    return context


def _watch(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    seen = _versions(cert, key)
    pause = threading.Event()
    while not pause.wait(_POLL_INTERVAL_S):
        found = _versions(cert, key)
        if found == seen:
            continue
        seen = found
        try:
            _try(cert, key)  # a half-written pair must not end up in the context in use
            context.load_cert_chain(cert, key)
        except OSError as error:
            logger.error("cannot use the new certificate in %s, keeping the old one: %s", cert, error)
        else:
            logger.info("reloaded the certificate in %s", cert)


def _versions(*files: Path) -> list[tuple[int, int, int] | None]:
    return [_version(file) for file in files]


def _version(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()  # follows the symbolic links that certificate managers swap
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _try(cert: Path, key: Path) -> None:
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password=_no_password)


def _no_password() -> str:
    raise ssl.SSLError("the key is encrypted, and a server cannot ask for its password")
