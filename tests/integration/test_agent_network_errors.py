"""Network errors do not end a running agent; its log explains them."""

import datetime
import logging
import socket
import threading
from pathlib import Path

import pytest
import trustme
from support.tls import foreign_site, serving_tls

from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.connection import open_http
from client_agent.errors import StopRequested
from shared.http.client_connection import Connection

DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


def first_warning(connection: Connection, caplog: pytest.LogCaptureFixture) -> str:
    """Ask for work until the first warning, and return it."""
    stopping = threading.Event()

    class StopAtFirst(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            stopping.set()

    handler = StopAtFirst()
    logging.getLogger("client_agent.coordinator.client").addHandler(handler)
    try:
        with open_http(connection, "token") as http, pytest.raises(StopRequested):
            Coordinator(http, stopping).task("none")
    finally:
        logging.getLogger("client_agent.coordinator.client").removeHandler(handler)
    return caplog.records[-1].getMessage()


def test_a_certificate_that_has_expired_is_logged(
    authority: trustme.CA, ca_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    old = authority.issue_cert("localhost", not_before=now - 3 * DAY, not_after=now - DAY)
    with serving_tls(foreign_site, old) as port:
        said = first_warning(Connection(server=f"https://localhost:{port}", ca_file=str(ca_file)), caplog)
    assert "asking for work: the coordinator's certificate has expired" in said
    assert "trying again in" in said


@pytest.mark.parametrize("status", [200, 403, 404])
def test_foreign_web_page_is_logged_as_not_a_coordinator(
    authority: trustme.CA, ca_file: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with serving_tls(foreign_site, authority.issue_cert("localhost")) as port:
        connection = Connection(server=f"https://localhost:{port}/{status}", ca_file=str(ca_file))
        said = first_warning(connection, caplog)
    assert f"The response (HTTP {status}) did not come from a coordinator" in said


def test_a_plain_server_that_hangs_up_is_not_mistaken_for_a_tls_server(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            for _ in range(2):  # the call, and the TLS handshake that the agent tries after it
                listening.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        said = first_warning(Connection(server=f"http://127.0.0.1:{listening.getsockname()[1]}"), caplog)
        thread.join()
    assert "TLS" not in said
    assert "trying again in" in said


def test_refused_connection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    said = first_warning(Connection(server=f"http://127.0.0.1:{port}"), caplog)
    assert "Connection refused" in said
