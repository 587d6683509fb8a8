"""A small HTTP forward proxy: CONNECT for https, absolute URLs for http."""

import contextlib
import socket
import threading
from urllib.parse import urlsplit

from support.tcp_server import TcpServer


class ForwardProxy(TcpServer):
    """Connects callers to whatever host they name; keeps the first line of each connection in `requests`."""

    def __init__(self, refusing: bool = False) -> None:
        self._refusing = refusing
        self.requests: list[str] = []
        super().__init__()

    def handle(self, client: socket.socket) -> None:
        """Connect the caller to the host in its request, or answer 403 when refusing."""
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(65536)
        self.requests.append(head.partition(b"\r\n")[0].decode())
        if self._refusing:
            client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            client.close()
            return
        method, target, _ = self.requests[-1].split()
        address = urlsplit(target if "://" in target else f"//{target}")
        server = self.connect(address.hostname, address.port)
        if method == "CONNECT":
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            server.sendall(head)
        threading.Thread(target=_pump, args=(client, server), daemon=True).start()
        _pump(server, client)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
