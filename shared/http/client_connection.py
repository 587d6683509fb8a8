"""How to reach a coordinator: its URL, which authority to trust, which client certificate to present."""

import ssl
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from shared.contract.errors import DistransError


class Connection(BaseModel):
    """A coordinator's URL and TLS files. Agents store it in their identity."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    server: str
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    allow_insecure_http: bool = False

    def check(self) -> None:
        """Raise if the URL is invalid or would send tokens and models over a network unencrypted."""
        try:
            parts = urlsplit(self.server)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            is_valid = is_valid and parts.username is None  # a password in the URL would be stored and displayed
        except ValueError:  # an unclosed bracket, or a port that is not a number
            is_valid = False
        if not is_valid:
            raise DistransError(f"{self.server!r} is not a valid URL.", next_step="Use https://host[:port].")
        if parts.scheme == "http" and not self.allow_insecure_http and not is_loopback(str(parts.hostname)):
            raise DistransError(
                f"{self.server} is not encrypted: anyone on the network could read the token.",
                next_step="Use https://, or pass --allow-insecure-http if you trust the network.",
            )

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context for calls to the coordinator. Raise if one of the files cannot be used."""
        named = {"--ca-file": self.ca_file, "--client-cert": self.client_cert, "--client-key": self.client_key}
        for option, file in named.items():
            if file is not None:
                _check_readable(option, file)
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise DistransError(
                f"--ca-file {self.ca_file} does not contain a PEM certificate.",
                next_step="Ask the operator for the authority's certificate as a PEM file.",
            ) from error
        if self.client_cert is not None:
            self._load_certificate(context, self.client_cert)
        elif self.client_key is not None:
            raise DistransError("--client-key needs a certificate.", next_step="Pass --client-cert too.")
        return context

    def _load_certificate(self, context: ssl.SSLContext, cert: str) -> None:
        try:
            context.load_cert_chain(cert, self.client_key, password=_no_passphrase)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                fault = "do not belong together"
            else:
                fault = "are not a PEM certificate and its key"
            raise DistransError(
                f"--client-cert {cert} and --client-key {self.client_key or '(none)'} {fault}.",
                next_step="Pass the PEM files of one certificate and its key.",
            ) from error


def is_loopback(host: str) -> bool:
    """Return whether a host name can only mean this machine."""
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
            f"{option} {file} cannot be read: {error.strerror}.", next_step="Pass the path of a PEM file."
        ) from error


def _no_passphrase() -> str:
    # Otherwise OpenSSL would prompt on the terminal, and an agent would hang at every start.
    raise DistransError(
        "The key in --client-key is protected by a passphrase, which is not supported.",
        next_step="Remove the passphrase (openssl pkey -in KEY -out NEW), and make the file readable by its user only.",
    )
