"""Sockets that both web services listen on."""

import socket

import pytest
import uvicorn

from shared.http.listener import Listener, listen
from shared.problems import DistransError


def config(host: str, port: int = 0) -> uvicorn.Config:
    return uvicorn.Config("not:imported", host=host, port=port, log_config=None)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_every_address_means_ipv4_too() -> None:
    with listen(config("::")) as listening, socket.create_connection(("127.0.0.1", listening.getsockname()[1])):
        pass


def test_a_port_that_is_taken_is_named_with_the_cause() -> None:
    with listen(config("127.0.0.1")) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(DistransError, match=f"Cannot listen on 127.0.0.1:{port}: Address already in use."):
            listen(config("127.0.0.1", port))


def test_answers_do_not_wait_for_acknowledgments() -> None:
    with listen(config("127.0.0.1")) as listening:
        counting = Listener(listening, total=0, per_address=0)
        with counting, socket.create_connection(listening.getsockname()), counting.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
