"""Callers of `bench predict`: one process that keeps a number of connections busy and times every call."""

import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Burst:
    """Calls to one server: the same request over and over, from several connections at once."""

    port: int
    request: bytes
    callers: int
    calls: int


@dataclass(frozen=True)
class BurstTimes:
    """What one burst took."""

    seconds: float
    latencies_s: list[float]


class Callers:
    """The process, ready for bursts."""

    def __init__(self, pipe: "Connection[Burst, BurstTimes | str]") -> None:
        self._pipe = pipe

    def run(self, burst: Burst) -> BurstTimes:
        """Return when all calls of a burst have been answered; raise RuntimeError if one failed."""
        self._pipe.send(burst)
        times = self._pipe.recv()
        if isinstance(times, str):
            raise RuntimeError(times)
        return times


@contextmanager
def open_callers() -> Iterator[Callers]:
    """Start the process; stop it at the end of the block."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_run_bursts, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        yield Callers(here)
    finally:
        here.close()  # tells it to end
        process.join()


def request(path: str, body: bytes) -> bytes:
    """Return a POST request with a JSON body on a connection that stays open."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _run_bursts(pipe: "Connection[BurstTimes | str, Burst]") -> None:
    while True:
        try:
            burst = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_run(burst))
        except (OSError, RuntimeError) as error:
            pipe.send(str(error))


def _run(burst: Burst) -> BurstTimes:
    """Keep all connections busy from one thread: plain sockets, because an HTTP library would add its own time."""
    latencies: list[float] = []
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        connections = [stack.enter_context(_Connection(burst)) for _ in range(burst.callers)]
        for one in connections:
            selector.register(one.socket, selectors.EVENT_READ, one)
        started = time.perf_counter()
        left = burst.calls
        for one in connections[:left]:
            one.send()
        left -= len(connections[:left])
        while len(latencies) < burst.calls:
            ready = selector.select(_TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"No answer within {_TIMEOUT_S:g} s.")
            for key, _ in ready:
                one = key.data
                if (latency := one.receive()) is not None:
                    latencies.append(latency)
                    if left:
                        left -= 1
                        one.send()
        return BurstTimes(time.perf_counter() - started, latencies)


class _Connection:
    """A connection with one call at a time."""

    def __init__(self, burst: Burst) -> None:
        self.socket = socket.create_connection(("127.0.0.1", burst.port), timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request, self._answer, self._expected, self._sent_at = burst.request, b"", 0, 0.0

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self) -> None:
        """Send the request."""
        self._answer, self._expected, self._sent_at = b"", 0, time.perf_counter()
        self.socket.sendall(self._request)

    def receive(self) -> float | None:
        """Read what has arrived; return the seconds of the call once its answer is complete."""
        data = self.socket.recv(65536)
        if not data:
            raise RuntimeError("The service closed the connection.")
        self._answer += data
        if not self._expected:
            head, end, _ = self._answer.partition(b"\r\n\r\n")
            if not end:
                return None
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(self._answer.decode(errors="replace"))
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._expected = len(head) + len(end) + int(length)
        return time.perf_counter() - self._sent_at if len(self._answer) >= self._expected else None
