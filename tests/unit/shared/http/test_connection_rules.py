"""Which coordinator URLs are accepted."""

import pytest

from shared.contract.errors import DistransError
from shared.http.client_connection import Connection


@pytest.mark.parametrize("server", ["http://coordinator.example", "http://10.0.0.7:8400"])
def test_plain_http_to_another_machine_is_refused_unless_allowed(server: str) -> None:
    with pytest.raises(DistransError, match="not encrypted"):
        Connection(server=server).check()
    Connection(server=server, allow_insecure_http=True).check()


@pytest.mark.parametrize("server", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:8400", "https://x.example"])
def test_loopback_and_https_are_accepted(server: str) -> None:
    Connection(server=server).check()


def test_invalid_coordinator_url_is_refused() -> None:
    with pytest.raises(DistransError, match="is not a valid URL"):
        Connection(server="coordinator").check()
