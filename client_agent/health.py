"""The health check of the container image. It imports next to nothing: it runs every few seconds."""

import http.client
import ssl
import sys

_TIMEOUT_S = 2.0


def check(port: int) -> None:
    """End with 0 when the agent on this machine answers, with or without TLS, and with 1 otherwise."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # it asks for a sign of life and sends nothing
    for connection in (
        http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S),
        http.client.HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=trust),
    ):
        try:
            connection.request("GET", "/healthz")
            sys.exit(connection.getresponse().status != http.HTTPStatus.OK)
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    sys.exit(1)
