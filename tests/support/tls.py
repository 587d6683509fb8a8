"""A web server with TLS in a thread of the test's process."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import trustme
import uvicorn


@contextmanager
def serving_tls(
    app: Any, certificate: trustme.LeafCert, client_authority: trustme.CA | None = None, lifespan: Any = "off"
) -> Iterator[int]:
    """Serve an application; the port. With a client authority callers need a certificate of it."""
    with ExitStack() as stack:
        chain = stack.enter_context(certificate.private_key_and_cert_chain_pem.tempfile())
        asking: dict[str, Any] = {}
        if client_authority is not None:
            asking["ssl_ca_certs"] = stack.enter_context(client_authority.cert_pem.tempfile())
            asking["ssl_cert_reqs"] = ssl.CERT_REQUIRED
        config = uvicorn.Config(app, port=0, log_config=None, lifespan=lifespan, ssl_certfile=chain, **asking)
        listening = stack.enter_context(config.bind_socket())
        listening.listen(128)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
