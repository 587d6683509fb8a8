"""Calls to a coordinator: which addresses are safe, whom to trust, bounded responses, readable network errors."""

import ssl
import urllib.request
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx

from shared import __version__
from shared.problems import DistransError

MAX_ANSWER_BYTES = 32 * 1024 * 1024  # a plan with 100,000 classes fits
_TIMEOUT = httpx.Timeout(30.0, read=300.0)  # creating a federation of a large network takes a while


@dataclass(frozen=True)
class Target:
    """A coordinator's address, and how to reach it."""

    server: str
    ca_file: str | None = None
    allow_insecure_http: bool = False

    def check(self) -> None:
        """Refuse to send a token in the clear over a network."""
        parts = urlsplit(self.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DistransError(f"{self.server!r} is not a valid URL.", next_step="Use https://host[:port].")
        if parts.scheme == "http" and not self.allow_insecure_http and not is_loopback(parts.hostname):
            raise DistransError(
                f"{self.server} is not encrypted: anybody on the way could read the token.",
                next_step="Use https://, or --allow-insecure-http if the network is trusted.",
            )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and no other."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_client(target: Target, token: str, program: str) -> httpx.Client:
    """An HTTP client that carries the token; proxies come from the environment."""
    target.check()
    headers = {"User-Agent": f"{program}/{__version__}", "Authorization": f"Bearer {token}"}
    try:
        return httpx.Client(base_url=target.server, headers=headers, verify=_trust(target), timeout=_TIMEOUT)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise DistransError(
            f"The proxy that the environment names cannot be used: {str(error).rstrip('.')}.",
            next_step="Check HTTPS_PROXY, HTTP_PROXY and ALL_PROXY; http:// and https:// proxies work.",
        ) from error


def _trust(target: Target) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=target.ca_file)
    except OSError as error:  # ssl.SSLError is one
        reason = "it holds no certificate in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
        raise DistransError(
            f"--ca-file {target.ca_file} cannot be used: {reason}.",
            next_step="Give the PEM file of the authority that signed the coordinator's certificate.",
        ) from error


def read_bounded(response: httpx.Response) -> bytes:
    """The body of a response that is not a model."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise DistransError(
                f"The answer has more than {MAX_ANSWER_BYTES} bytes.", next_step="Check that --server is a coordinator."
            )
    return bytes(body)


@dataclass(frozen=True)
class Explanation:
    """Why the coordinator could not be reached, and what to do."""

    cause: str
    next_step: str


# What OpenSSL says, in lower case; the first one found counts.
_TLS_ERRORS = {
    "certificate has expired": Explanation("its certificate has expired", "Renew it, and check this machine's clock."),
    "certificate is not yet valid": Explanation("its certificate is not valid yet", "Check this machine's clock."),
    "mismatch, certificate is not valid for": Explanation(
        "its certificate is for another name", "Use the name that stands in the certificate as --server."
    ),
    "certificate verify failed": Explanation(
        "its certificate is from an authority that is not trusted here",
        "Pass the certificate of the authority that issued it as --ca-file.",
    ),
    "wrong version number": Explanation(
        "it does not speak TLS at this address", "Check the port of --server; plain http is for this machine only."
    ),
    " alert ": Explanation("it rejects the TLS handshake", "It may ask for a client certificate."),
}


def explain(error: httpx.HTTPError) -> Explanation:
    """A readable network error, with the original text of OpenSSL or the system."""
    text = (str(error) or type(error).__name__).partition(" (_ssl")[0].rstrip(".")
    for marker, known in _TLS_ERRORS.items():
        if marker in text.lower():
            said = text.rpartition("] ")[2].removeprefix("certificate verify failed: ")
            return Explanation(f"{known.cause} ({said})", known.next_step)
    if isinstance(error, httpx.RemoteProtocolError) and error.request.url.scheme == "http":
        return Explanation(f"it hung up ({text})", "If it speaks TLS, use https:// in --server.")
    if isinstance(error, httpx.ConnectError | httpx.ProxyError) and urllib.request.getproxies():
        return Explanation(f"{text}; a proxy is set in the environment", "Check HTTPS_PROXY, NO_PROXY and --server.")
    return Explanation(text, "Check --server and the network.")
