"""Calls to a coordinator: a client with its token, bounded responses, readable network errors."""

import socket
import ssl
import urllib.request
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from shared import __version__
from shared.contract.errors import DistransError, ForeignAnswer
from shared.http.client_connection import Connection

MAX_ANSWER_BYTES = 32 * 1024 * 1024  # a plan with 100,000 classes fits
_CONNECT_S = 30.0
_HANDSHAKE_S = 5.0


class _Bearer(httpx.Auth):
    """Bearer authentication that reads the token again for every request."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if token := self._token():
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


def open_client(
    connection: Connection,
    token: str | Callable[[], str],
    *,
    program: str,
    read_s: float,
    headers: Mapping[str, str] | None = None,
) -> httpx.Client:
    """Return an HTTP client for the coordinator. Pass a function as `token` if it can change while the client is open.

    Proxies come from the environment.
    """
    connection.check()
    try:
        return httpx.Client(
            base_url=connection.server,
            auth=_Bearer(token if callable(token) else lambda: token),
            headers={"User-Agent": f"{program}/{__version__}", **(headers or {})},
            verify=connection.tls_context(),
            timeout=httpx.Timeout(_CONNECT_S, read=read_s),
        )
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise DistransError(
            f"The proxy set in the environment cannot be used: {str(error).rstrip('.')}.",
            next_step="Check HTTPS_PROXY, HTTP_PROXY and ALL_PROXY; only http:// and https:// proxies are supported.",
        ) from error


def request(http: httpx.Client, method: str, url: str, **options: Any) -> httpx.Response:
    """Send a request and read the whole response. Raise ForeignAnswer if it exceeds MAX_ANSWER_BYTES."""
    with http.stream(method, url, **options) as response:
        content = read_bounded(response)
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name not in ("content-encoding", "content-length", "transfer-encoding")  # these describe the encoded bytes
    ]
    return httpx.Response(response.status_code, headers=headers, content=content, request=response.request)


def read_bounded(response: httpx.Response) -> bytes:
    """Return the body of a response. Raise ForeignAnswer if it exceeds MAX_ANSWER_BYTES; not for models."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ForeignAnswer(response.status_code)
    return bytes(body)


@dataclass(frozen=True)
class Explanation:
    """Why the coordinator could not be reached, and what to do."""

    cause: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.cause}. {self.next_step}"


_CLIENT_CERTIFICATE = "Ask the operator which certificate to use, and pass it with --client-cert and --client-key."
# Substrings of OpenSSL's messages, in lower case; the first match wins.
_TLS_ERRORS = {
    "certificate has expired": Explanation(
        "the coordinator's certificate has expired",
        "Ask the operator to renew it, and check this machine's clock.",
    ),
    "certificate is not yet valid": Explanation(
        "the coordinator's certificate is not yet valid",
        "Check this machine's clock.",
    ),
    "mismatch, certificate is not valid for": Explanation(
        "the coordinator's certificate is for another name",
        "Use the name in the certificate in --server.",
    ),
    "certificate verify failed": Explanation(
        "the coordinator's certificate comes from an authority this machine does not trust",
        "If it is the operator's own authority, pass its certificate with --ca-file; otherwise do not continue.",
    ),
    "alert certificate required": Explanation("the coordinator requires a client certificate", _CLIENT_CERTIFICATE),
    "alert handshake failure": Explanation(
        "the coordinator aborted the TLS handshake; it may require a client certificate", _CLIENT_CERTIFICATE
    ),
    " alert ": Explanation("the coordinator rejected this site's client certificate", _CLIENT_CERTIFICATE),
    "wrong version number": Explanation(
        "the server does not speak TLS at this address",
        "Check the port in --server; http:// works on this machine only.",
    ),
    "eof occurred in violation of protocol": Explanation(
        "the coordinator aborted the TLS handshake; it may require a client certificate", _CLIENT_CERTIFICATE
    ),
}


def explain(error: httpx.HTTPError) -> Explanation:
    """Return a readable explanation of a network error, including the original text from OpenSSL or the system."""
    text = (str(error) or type(error).__name__).partition(" (_ssl")[0].rstrip(".")
    for marker, known in _TLS_ERRORS.items():
        if marker in text.lower():
            reason = text.rpartition("] ")[2].removeprefix("certificate verify failed: ")
            return Explanation(f"{known.cause} ({reason})", known.next_step)
    if isinstance(error, httpx.ProxyError):
        return Explanation(
            f"the proxy refused ({text})", "Check HTTPS_PROXY and NO_PROXY, or ask the proxy's operator."
        )
    try:
        url = error.request.url
    except RuntimeError:  # the request was never sent
        return Explanation(text, "Check the network.")
    hung_up = isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError))
    if hung_up and url.scheme == "http" and not _through_proxy(url) and _speaks_tls(url):
        return Explanation(f"the server at {url.host}:{url.port or 80} expects TLS", "Use https:// in --server.")
    if isinstance(error, httpx.RemoteProtocolError) and url.scheme == "https":
        return Explanation(
            f"the coordinator hung up ({text})",
            "If it requires client certificates, pass --client-cert and --client-key.",
        )
    if isinstance(error, httpx.ConnectError) and _through_proxy(url):
        return Explanation(
            f"{text}; a proxy is set in the environment",
            "Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY, then --server and the network.",
        )
    return Explanation(text, "Check --server and the network.")


def _speaks_tls(url: httpx.URL) -> bool:
    """Try a handshake: a TLS server hangs up on plain HTTP, but so does a server that is restarting."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent; any handshake will do
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
