"""A TCP proxy that can stop at a chosen point of a request, to cut a conversation exactly there."""

import contextlib
import socket
import threading
from typing import Literal

Cut = Literal["before-request", "half-request", "before-response"]


class CuttingProxy:
    """Forwards to a port on this machine. Once armed, the next connection whose request matches is cut and held."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._armed: tuple[bytes, Cut] | None = None
        self.cut = threading.Event()
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def arm(self, marker: bytes, where: Cut) -> None:
        """Hold the next request that contains the marker at this point; `cut` is set when it is held."""
        self.cut.clear()
        self._armed = (marker, where)

    def close(self) -> None:
        """Close everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which a close does not
        self._listener.close()
        self._accepting.join()
        for connection in self._sockets:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:  # the coordinator is away: so are we
                client.close()
                continue
            self._sockets += [client, server]
            held = threading.Event()
            threading.Thread(target=self._pump, args=(client, server, held, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, held, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, held: threading.Event, is_request: bool) -> None:
        try:
            while data := source.recv(65536):
                if is_request and not held.is_set() and self._armed and self._armed[0] in data:
                    where, self._armed = self._armed[1], None
                    held.set()
                    if where == "before-request":
                        self.cut.set()
                        return
                    if where == "half-request":
                        sink.sendall(data[: len(data) // 2])
                        self.cut.set()
                        return
                elif not is_request and held.is_set():
                    self.cut.set()
                    return
                sink.sendall(data)
        except OSError:
            pass
        finally:
            if not held.is_set():
                for end in (source, sink):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
