"""The cost of `/predict` over the bare network, measured in one run.

The agent's web service runs in its own process and is called over one keep-alive connection. The bare side decodes the
same file and runs the same network with the same offset in this process. Both compute with one thread. The two kinds
of calls alternate, so that other load on the machine slows both alike; the report shows the medians of the differences
and ratios between consecutive calls. The caller is a plain socket, because an HTTP library would add its own time.
"""

import io
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from client_agent.data.images import PREDICT_FORMATS, decode, to_tensor
from client_agent.serving.candidates import Base
from client_agent.serving.model import ServingModel, build
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import ServeOptions
from client_agent.state.kept_models import Bundle
from client_agent.threads import limit_threads
from client_agent.web.app import create_app
from client_agent.web.serve import web_server as web_service
from client_agent.web.site import Site
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.methods import server_half
from shared.learning.methods.base import ClientRecord, RoundContext
from shared.learning.runtime import Runtime
from shared.tensors.wire import digest, encode

_CALLERS = 8
_BURSTS = 5
_OPTIONS = ServeOptions(port=0, threads=1)


@dataclass(frozen=True)
class PredictSpeed:
    """Seconds per call, bare and served in pairs, and the throughput of parallel callers."""

    backbone: str
    bare_s: list[float]
    served_s: list[float]
    throughput_ratios: list[float]  # parallel callers ÷ bare loop, per burst

    @property
    def overhead_s(self) -> float:
        """Median extra time of a call over the bare decode and forward pass."""
        return statistics.median(b - a for a, b in zip(self.bare_s, self.served_s, strict=True))

    @property
    def time_ratio(self) -> float:
        """Median ratio of a call's time to the bare time."""
        return statistics.median(b / a for a, b in zip(self.bare_s, self.served_s, strict=True))

    @property
    def throughput_ratio(self) -> float:
        """Median ratio of the parallel callers' calls per second to the bare loop's."""
        return statistics.median(self.throughput_ratios)


def measure(backbone: str, calls: int) -> PredictSpeed:
    """Time `calls` alternating calls of each kind, then as many again in bursts."""
    limit_threads(_OPTIONS.threads)
    plan, image = _plan(backbone), _image()
    network = _model(plan).predictors[Base.OFFSET]

    def bare() -> None:
        images = to_tensor(decode(image, PREDICT_FORMATS), plan.image)[None]
        network(images).softmax(dim=1).topk(3)

    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(backbone, there), daemon=True)
    process.start()
    there.close()
    try:
        port = here.recv()
        with _Caller(port, image) as caller:
            for _ in range(max(10, calls // 10)):  # warm-up
                bare()
                caller.call()
            bare_s, served_s = _alternate(calls, bare, caller.call)
        each = max(1, calls // _BURSTS // _CALLERS)
        ratios = [_compare_throughput(each, bare, partial(_Caller, port, image)) for _ in range(_BURSTS)]
    finally:
        here.close()  # tells it to end
        process.join()
    return PredictSpeed(backbone, bare_s, served_s, ratios)


def _alternate(calls: int, bare: Callable[[], None], served: Callable[[], None]) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    kinds = [(bare, times[0]), (served, times[1])]
    for _ in range(calls):
        kinds.reverse()  # the kinds take turns going first
        for call, seconds in kinds:
            seconds.append(_time(call))
    return times


def _compare_throughput(each: int, bare: Callable[[], None], connect: Callable[[], "_Caller"]) -> float:
    """Return the calls per second of parallel callers, relative to a bare loop just before."""

    def alone() -> None:
        for _ in range(each * _CALLERS):
            bare()

    alone_s = _time(alone)
    # Connect only now: the service closes idle connections.
    with ExitStack() as stack:
        callers = [stack.enter_context(connect()) for _ in range(_CALLERS)]
        pool = stack.enter_context(ThreadPoolExecutor(_CALLERS))

        def at_once() -> None:
            list(pool.map(lambda caller: [caller.call() for _ in range(each)], callers))

        return alone_s / _time(at_once)


def _time(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class _Caller:
    """A connection that sends the same image over and over."""

    def __init__(self, port: int, image: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        head = ["POST /predict HTTP/1.1", "Host: 127.0.0.1", "Content-Type: image/png", f"Content-Length: {len(image)}"]
        self._request = "\r\n".join([*head, "", ""]).encode() + image

    def __enter__(self) -> "_Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self) -> None:
        """Send the image and wait for the complete response."""
        self._socket.sendall(self._request)
        response = b""
        while b"\r\n\r\n" not in response:
            response += self._receive()
        head, _, body = response.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self._receive()

    def _receive(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise RuntimeError("the service closed the connection")
        return data


def _serve(backbone: str, ready: Connection) -> None:
    """Run the agent's web service until the other end of the pipe is closed."""
    limit_threads(_OPTIONS.threads)
    plan = _plan(backbone)
    predictions = PredictionQueue(_OPTIONS.queue, _OPTIONS.max_images, _OPTIONS.threads)
    predictions.model = _model(plan)
    with web_service(create_app(plan, predictions, _OPTIONS, Site(dict)), _OPTIONS) as port:
        ready.send(port)
        ready.poll(None)
    predictions.stop()


def _plan(backbone: str) -> FederationPlan:
    return validate_plan(
        {
            "name": "bench",
            "classes": [str(label) for label in range(10)],
            "model": {"backbone": backbone, "activation": "relu"},
            "method": {"name": "distrans", "offset_aggregation": "none"},
        }
    )


def _model(plan: FederationPlan) -> ServingModel:
    half, me = server_half(plan), ClientRecord("bench", (1,) * len(plan.classes))
    state, facts = half.initial_state(), half.facts([me])
    personal = half.personal(state, me, RoundContext([me], facts))
    return build(plan, "bench", Bundle(1, digest(encode(state.shared)), state.shared, personal, {}, facts), Runtime())


def _image() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def run_bench(console: Console, backbones: list[str] | None, calls: int) -> None:
    """Measure and print a table."""
    table = Table(
        title="/predict at 64×64, one thread for the network",
        caption=f"Overhead and ratio: medians over pairs of calls. Throughput: {_CALLERS} callers ÷ bare loop.",
    )
    for heading in ("backbone", "bare p50", "p50", "p99", "overhead", "÷ bare", "throughput"):
        table.add_column(heading, justify="left" if heading == "backbone" else "right")
    with console.status("measuring") as status:
        for backbone in backbones or ["lenet", "resnet18"]:
            status.update(f"measuring {backbone}")
            speed = measure(backbone, calls)
            table.add_row(
                backbone,
                f"{1000 * statistics.median(speed.bare_s):.2f} ms",
                f"{1000 * statistics.median(speed.served_s):.2f} ms",
                f"{1000 * statistics.quantiles(speed.served_s, n=100)[98]:.2f} ms",
                f"{1000 * speed.overhead_s:.2f} ms",
                f"{speed.time_ratio:.2f}×",
                f"{speed.throughput_ratio:.0%}",
            )
    console.print(table)
