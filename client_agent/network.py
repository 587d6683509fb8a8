"""The way to the coordinator: TLS files, proxies from the environment, bounded responses, readable network errors."""

import socket
import ssl
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from client_agent.errors import ForeignAnswer, UnusableModel
from client_agent.settings import Connection
from shared import __version__, versions
from shared.problems import DistransError

LONG_POLL_S = 30.0
MAX_ANSWER_BYTES = 32 * 1024 * 1024  # a plan with 100,000 classes fits
_HANDSHAKE_S = 5.0
_TIMEOUT = httpx.Timeout(30.0, read=LONG_POLL_S + 30.0)


class _Bearer(httpx.Auth):
    """Asks for the token anew for each request."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if token := self._token():
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


def open_http(connection: Connection, token: str | Callable[[], str] = "") -> httpx.Client:
    """An HTTP client for the coordinator; proxies come from the environment. A token may change while it is open."""
    connection.check()
    auth = _Bearer(token if callable(token) else lambda: token)
    headers = {"User-Agent": f"distrans-agent/{__version__}", versions.HEADER: str(versions.PROTOCOL)}
    options: dict[str, Any] = {"headers": headers, "timeout": _TIMEOUT}
    try:
        return httpx.Client(base_url=connection.server, auth=auth, verify=_trust(connection), **options)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise DistransError(
            f"The proxy that the environment names cannot be used: {str(error).rstrip('.')}.",
            next_step="Check HTTPS_PROXY, HTTP_PROXY and ALL_PROXY; http:// and https:// proxies work.",
        ) from error


def request(http: httpx.Client, method: str, url: str, **options: Any) -> httpx.Response:
    """Send a request and read the whole response; one of more than MAX_ANSWER_BYTES raises ForeignAnswer."""
    with http.stream(method, url, **options) as response:
        content = read_all(response)
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name not in ("content-encoding", "content-length", "transfer-encoding")  # of the bytes on the wire
    ]
    return httpx.Response(response.status_code, headers=headers, content=content, request=response.request)


def read_all(response: httpx.Response) -> bytes:
    """The body of a response that is not a model."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ForeignAnswer(response.status_code)
    return bytes(body)


def on_own_origin(http: httpx.Client, url: str) -> httpx.URL:
    """A URL that the coordinator named, which must be on the coordinator: the token goes nowhere else."""
    base = http.base_url
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise UnusableModel(f"The coordinator names {url[:200]!r}, which is not a valid URL.") from error
    is_path = url.startswith("/") and not target.scheme and not target.host
    is_own = (target.scheme, target.host, target.port) == (base.scheme, base.host, base.port) and not target.userinfo
    if not is_path and not is_own:
        raise UnusableModel(
            f"The coordinator names {url[:200]!r}, which is not on {base.scheme}://{base.netloc.decode()}."
        )
    return target


def _trust(connection: Connection) -> ssl.SSLContext:
    """Whom to trust and how to show who we are."""
    named = {
        "--ca-file": connection.ca_file,
        "--client-cert": connection.client_cert,
        "--client-key": connection.client_key,
    }
    for option, file in named.items():
        if file is not None:
            _check_readable(option, file)
    try:
        context = ssl.create_default_context(cafile=connection.ca_file)
    except ssl.SSLError as error:
        raise DistransError(
            f"--ca-file {connection.ca_file} holds no certificate in PEM form.",
            next_step="Ask the operator for the certificate of the authority as a PEM file.",
        ) from error
    if connection.client_cert is None:
        if connection.client_key is not None:
            raise DistransError("--client-key needs its certificate.", next_step="Give --client-cert too.")
        return context
    try:
        context.load_cert_chain(connection.client_cert, connection.client_key, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            fault = "do not belong together"
        else:
            fault = "do not hold a certificate and its key in PEM form"
        raise DistransError(
            f"--client-cert {connection.client_cert} and --client-key {connection.client_key or '(none)'} {fault}.",
            next_step="Give the PEM files of one certificate and of its key.",
        ) from error
    return context


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
        next_step="Write it without one, readable by the agent's user alone: openssl pkey -in KEY -out NEW.",
    )


@dataclass(frozen=True)
class Explanation:
    """Why the coordinator could not be reached, and what to do."""

    cause: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.cause}. {self.next_step}"


_CLIENT_CERTIFICATE = "Ask its operator, and join with the right --client-cert and --client-key."
# What OpenSSL says, in lower case; the first one found counts.
_TLS_ERRORS = {
    "certificate has expired": Explanation(
        "the coordinator's certificate has expired",
        "Ask its operator to renew it, and check this machine's clock.",
    ),
    "certificate is not yet valid": Explanation(
        "the coordinator's certificate is not valid yet",
        "Check this machine's clock.",
    ),
    "mismatch, certificate is not valid for": Explanation(
        "the coordinator's certificate is for another name",
        "Join with the name that stands in the certificate as --server.",
    ),
    "certificate verify failed": Explanation(
        "the coordinator's certificate is from an authority that is not trusted here",
        "If it is the operator's own, join with its certificate as --ca-file; else do not go on.",
    ),
    "alert certificate required": Explanation("the coordinator asks for a client certificate", _CLIENT_CERTIFICATE),
    "alert handshake failure": Explanation(
        "the coordinator broke off the TLS handshake; it may ask for a client certificate", _CLIENT_CERTIFICATE
    ),
    " alert ": Explanation("the coordinator does not accept this site's client certificate", _CLIENT_CERTIFICATE),
    "wrong version number": Explanation(
        "the server does not speak TLS at this address",
        "Check the port of --server; plain http is for this machine only.",
    ),
    "eof occurred in violation of protocol": Explanation(
        "the coordinator broke off the TLS handshake; it may ask for a client certificate", _CLIENT_CERTIFICATE
    ),
}


def explain(error: httpx.HTTPError) -> Explanation:
    """A readable network error, with the original text of OpenSSL or the system."""
    text = (str(error) or type(error).__name__).partition(" (_ssl")[0].rstrip(".")
    for marker, known in _TLS_ERRORS.items():
        if marker in text.lower():
            said = text.rpartition("] ")[2].removeprefix("certificate verify failed: ")
            return Explanation(f"{known.cause} ({said})", known.next_step)
    if isinstance(error, httpx.ProxyError):
        return Explanation(f"the proxy refuses ({text})", "Check HTTPS_PROXY and NO_PROXY, or ask whoever runs it.")
    try:
        url = error.request.url
    except RuntimeError:  # it was never sent
        return Explanation(text, "Check the network.")
    hung_up = isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError))
    if hung_up and url.scheme == "http" and not _through_proxy(url) and _speaks_tls(url):
        return Explanation(f"the server at {url.host}:{url.port or 80} expects TLS", "Use https:// in --server.")
    if isinstance(error, httpx.RemoteProtocolError) and url.scheme == "https":
        return Explanation(
            f"the coordinator hung up ({text})",
            "If it asks for client certificates, join with --client-cert and --client-key.",
        )
    if isinstance(error, httpx.ConnectError) and _through_proxy(url):
        return Explanation(
            f"{text}; a proxy is set in the environment",
            "Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY, then --server and the network.",
        )
    return Explanation(text, "Check --server and the network.")


def _speaks_tls(url: httpx.URL) -> bool:
    """Try a handshake: a TLS server just hangs up on plain HTTP, as one that restarts does."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent; it only has to answer
    try:
        with (
            socket.create_connection((url.host, url.port or 80), timeout=_HANDSHAKE_S) as plain,
            context.wrap_socket(plain, server_hostname=url.host),
        ):
            return True
    except OSError:
        return False


def _through_proxy(url: httpx.URL) -> bool:
    proxies = urllib.request.getproxies()
    named = url.scheme in proxies or "all" in proxies
    return named and not urllib.request.proxy_bypass(url.host)
