"""A small HTTP proxy: CONNECT for https, whole addresses for http."""

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class ForwardProxy:
    """Connects its callers with whatever they name, and keeps the first line of each connection."""

    def __init__(self, refusing: bool = False) -> None:
        self._refusing = refusing
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[str] = []
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> "ForwardProxy":
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._listener)
        self._accepting.join()
        for end in self._sockets:
            _close(end)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
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
        server = socket.create_connection((address.hostname, address.port))
        self._sockets.append(server)
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


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it, which a close does not
    end.close()
