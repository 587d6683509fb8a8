"""A coordinator's address and how to reach it: which addresses are safe, whom to trust, which certificate to show."""

import ssl
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from shared.problems import DistransError


class Connection(BaseModel):
    """How to reach the coordinator. Agents store it in their identity."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    server: str
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    allow_insecure_http: bool = False

    def check(self) -> None:
        """Refuse to send tokens and models in the clear over a network."""
        try:
            parts = urlsplit(self.server)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            is_valid = is_valid and parts.username is None  # a password here would be stored and displayed
        except ValueError:  # brackets without an end, a port that is no number
            is_valid = False
        if not is_valid:
            raise DistransError(f"{self.server!r} is not a valid URL.", next_step="Use https://host[:port].")
        if parts.scheme == "http" and not self.allow_insecure_http and not is_loopback(str(parts.hostname)):
            raise DistransError(
                f"{self.server} is not encrypted: anybody on the way could read the token.",
                next_step="Use https://, or --allow-insecure-http if the network is trusted.",
            )

    def tls_context(self) -> ssl.SSLContext:
        """Whom to trust and how to show who we are."""
        named = {"--ca-file": self.ca_file, "--client-cert": self.client_cert, "--client-key": self.client_key}
        for option, file in named.items():
            if file is not None:
                _check_readable(option, file)
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise DistransError(
                f"--ca-file {self.ca_file} holds no certificate in PEM form.",
                next_step="Ask the operator for the certificate of the authority as a PEM file.",
            ) from error
        if self.client_cert is not None:
            self._show_certificate(context, self.client_cert)
        elif self.client_key is not None:
            raise DistransError("--client-key needs its certificate.", next_step="Give --client-cert too.")
        return context

    def _show_certificate(self, context: ssl.SSLContext, cert: str) -> None:
        try:
            context.load_cert_chain(cert, self.client_key, password=_no_passphrase)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                fault = "do not belong together"
            else:
                fault = "do not hold a certificate and its key in PEM form"
            raise DistransError(
                f"--client-cert {cert} and --client-key {self.client_key or '(none)'} {fault}.",
                next_step="Give the PEM files of one certificate and of its key.",
            ) from error


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and no other."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_readable(option: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise DistransError(
            f"{option} {file} cannot be read: {error.strerror}.", next_step="Give the path of a PEM file."
        ) from error


def _no_passphrase() -> str:
    # Without this OpenSSL would ask on the terminal, and an agent would hang there at every start.
    raise DistransError(
        "The key of --client-key is protected by a passphrase, which nobody is there to type.",
        next_step="Write it without one, readable by its user alone: openssl pkey -in KEY -out NEW.",
    )
