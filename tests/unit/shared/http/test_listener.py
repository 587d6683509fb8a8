"""The listening sockets of both web services."""

import socket

import pytest

from shared.contract.errors import DistransError
from shared.http.listener import Listener, listen


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no dual-stack IPv6 on this machine")
def test_listening_on_any_ipv6_address_accepts_ipv4() -> None:
    with listen("::", 0) as listening, socket.create_connection(("127.0.0.1", listening.getsockname()[1])):
        pass


def test_a_used_port_is_reported_with_its_cause() -> None:
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(DistransError, match=f"Cannot listen on 127.0.0.1:{port}: Address already in use."):
            listen("127.0.0.1", port)


def test_responses_do_not_wait_for_acknowledgments() -> None:
    with listen("127.0.0.1", 0) as listening:
        counting = Listener(listening, total=0, per_address=0)
        with counting, socket.create_connection(listening.getsockname()), counting.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
