"""How much `/predict` costs over the bare network, measured in one run."""

import asyncio
import io
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
import uvicorn
from PIL import Image
from rich.console import Console
from rich.table import Table

from client_agent import serving
from client_agent.api import create_app
from client_agent.images import PREDICT_FORMATS, decode, to_tensor
from client_agent.serving import PredictionQueue, ServingModel
from client_agent.settings import ServeOptions
from client_agent.state import Bundle
from shared.methods import server_half
from shared.methods.base import ClientRecord
from shared.plan import FederationPlan, validate_plan
from shared.runtime import Runtime
from shared.wire import digest, encode

_CALLERS = 8


@dataclass(frozen=True)
class PredictSpeed:
    """Milliseconds of one call, and calls per second."""

    backbone: str
    bare_p50_ms: float
    p50_ms: float
    p99_ms: float
    bare_per_s: float
    per_s: float


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
    personal = half.personal(state, me, [me], facts)
    return serving.build(
        plan, "bench", Bundle(1, digest(encode(state.shared)), state.shared, personal, {}, facts), Runtime()
    )


def _image() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _serve(backbone: str, ready: Connection) -> None:
    """The agent's web service in a process of its own."""
    torch.set_num_threads(1)
    plan, options = _plan(backbone), ServeOptions()
    predictions = PredictionQueue(options.queue, options.max_images, options.threads)
    predictions.model = _model(plan)
    config = uvicorn.Config(create_app(plan, predictions, options, dict), port=0, log_level="warning", access_log=False)
    socket = config.bind_socket()
    socket.listen(128)
    ready.send(socket.getsockname()[1])
    uvicorn.Server(config).run(sockets=[socket])


def measure(backbone: str, calls: int) -> PredictSpeed:
    """Bare decode and forward in this process, then the same over HTTP against the service."""
    torch.set_num_threads(1)
    plan, image = _plan(backbone), _image()
    model = _model(plan)
    bare: list[float] = []
    for _ in range(calls):
        started = time.perf_counter()
        tensor = to_tensor(decode(image, PREDICT_FORMATS), plan.image)[None]
        model.own(tensor).softmax(dim=1).topk(3)
        bare.append(time.perf_counter() - started)
    bare = bare[calls // 10 :]
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(backbone, there), daemon=True)
    process.start()
    try:
        port = here.recv()
        asyncio.run(_call(port, image, calls // 5, 1))  # warm up
        alone, _ = asyncio.run(_call(port, image, calls, 1))
        _, elapsed = asyncio.run(_call(port, image, calls, _CALLERS))
    finally:
        process.terminate()
        process.join()
    return PredictSpeed(
        backbone,
        1000 * statistics.median(bare),
        1000 * statistics.median(alone),
        1000 * statistics.quantiles(alone, n=100)[98],
        len(bare) / sum(bare),
        calls / elapsed,
    )


async def _call(port: int, image: bytes, calls: int, callers: int) -> tuple[list[float], float]:
    """Seconds of each call, and of all together; plain sockets, so that the caller costs little."""
    request = (
        f"POST /predict HTTP/1.1\r\nHost: bench\r\nContent-Type: image/png\r\nContent-Length: {len(image)}\r\n\r\n"
    ).encode() + image
    times: list[float] = []

    async def caller(share: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(share):
            started = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            times.append(time.perf_counter() - started)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(caller(calls // callers) for _ in range(callers)))
    return times, time.perf_counter() - started


def run_bench(console: Console, backbones: list[str] | None, calls: int) -> None:
    """Measure and print a table."""
    table = Table(title=f"/predict at 64×64, one thread for the network, {_CALLERS} callers for the throughput")
    for heading in ("backbone", "bare p50", "p50", "p99", "overhead p50", "p50 ÷ bare", "throughput ÷ bare"):
        table.add_column(heading, justify="left" if heading == "backbone" else "right")
    with console.status("measuring") as status:
        for backbone in backbones or ["lenet", "resnet18"]:
            status.update(f"measuring {backbone}")
            speed = measure(backbone, calls)
            table.add_row(
                backbone,
                f"{speed.bare_p50_ms:.2f} ms",
                f"{speed.p50_ms:.2f} ms",
                f"{speed.p99_ms:.2f} ms",
                f"{speed.p50_ms - speed.bare_p50_ms:.2f} ms",
                f"{speed.p50_ms / speed.bare_p50_ms:.2f}×",
                f"{speed.per_s / speed.bare_per_s:.0%}",
            )
    console.print(table)
