"""The container image's health check. It runs every few seconds, so it imports as little as possible."""

import http.client
import ssl
import sys

_TIMEOUT_S = 2.0


def check(port: int) -> None:
    """Exit with 0 if the agent on this machine answers, with or without TLS; otherwise with 1."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # it sends nothing secret
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
