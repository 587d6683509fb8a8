"""Certificates in files, SSL contexts that trust them, and a web server with TLS."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import trustme
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from support.sockets import serving

from shared.http.server_tls import Tls


def write_certificate(certificate: trustme.LeafCert, folder: Path, client_authority: trustme.CA | None = None) -> Tls:
    """Write key.pem, then cert.pem with the whole chain, and clients.pem if a client authority is given."""
    tls = Tls(folder / "cert.pem", folder / "key.pem")
    certificate.private_key_pem.write_to_path(tls.key)
    tls.cert.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    if client_authority is None:
        return tls
    clients = folder / "clients.pem"
    client_authority.cert_pem.write_to_path(clients)
    return replace(tls, client_ca=clients)


def trusting(authority: trustme.CA, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """Return a client context that trusts the authority and presents the certificate, if any."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


async def foreign_site(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as a server that is not a coordinator; paths below /404 get that status."""
    folder = scope["path"].split("/")[1]
    status = int(folder) if folder.isdigit() else 200
    await PlainTextResponse("<html>Welcome</html>", status)(scope, receive, send)


@contextmanager
def serving_tls(app: Any, certificate: trustme.LeafCert, client_authority: trustme.CA | None = None) -> Iterator[int]:
    """Serve an application and yield its port; with a client authority, demand certificates that it issued."""
    with TemporaryDirectory() as folder:
        tls = write_certificate(certificate, Path(folder), client_authority)
        options = tls.options() | {"ssl_context_factory": None}  # nobody renews these files
        with serving(app, **options) as url:
            port = urlsplit(url).port
            assert port is not None
            yield port
