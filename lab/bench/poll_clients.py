"""Agents that do nothing but wait for a round, many of them in one event loop."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from urllib.parse import urlsplit

from shared.contract import versions

WAIT_S = 30  # as agents do
_CONNECTING = 64  # connections opened at a time


class WaitingClients:
    """Clients that poll until there is work. All of them wait once `start` has returned."""

    def __init__(self, url: str, tokens: Sequence[str]) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._tokens = str(parts.hostname), parts.port, tokens
        self._tasks: list[asyncio.Task[float]] = []
        self._asking = asyncio.Semaphore(_CONNECTING)
        self._are_asking = asyncio.Event()
        self._sent = 0

    async def start(self, progress: Callable[[int], object]) -> None:
        """Connect all clients and send their first polls; `progress` is told how many there are."""
        # The first polls last between nothing and WAIT_S, so that at any time equally many are about to end.
        waits = [WAIT_S * (number + 1) / len(self._tokens) for number in range(len(self._tokens))]
        self._tasks = [
            asyncio.create_task(self._wait_for_work(token, first_s, progress))
            for token, first_s in zip(self._tokens, waits, strict=True)
        ]
        everyone = asyncio.create_task(self._are_asking.wait())
        done, _ = await asyncio.wait([everyone, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {everyone}:
            await task  # raises what went wrong
            raise RuntimeError("a client was given work before the round opened")

    async def learn(self) -> list[float]:
        """Return when each client learned of the round, by `time.perf_counter`."""
        return list(await asyncio.gather(*self._tasks))

    def cancel(self) -> None:
        """Hang up."""
        for task in self._tasks:
            task.cancel()

    async def _wait_for_work(self, token: str, first_s: float, progress: Callable[[int], object]) -> float:
        async with self._asking:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        with closing(writer):
            writer.write(self._request(token, first_s))
            self._count(progress)
            while (answer := await _read_answer(reader))["action"] != "train":
                writer.write(self._request(token, WAIT_S, answer["ticket"]))
            return time.perf_counter()

    def _count(self, progress: Callable[[int], object]) -> None:
        self._sent += 1
        progress(self._sent)
        if self._sent == len(self._tokens):
            self._are_asking.set()

    def _request(self, token: str, wait_s: float, ticket: str = "") -> bytes:
        lines = [
            f"GET /v1/task?wait={wait_s:g}&after={ticket} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            f"Authorization: Bearer {token}",
            f"{versions.HEADER}: {versions.PROTOCOL}",
        ]
        return "\r\n".join([*lines, "", ""]).encode()


async def _read_answer(reader: asyncio.StreamReader) -> dict[str, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
    if not head.startswith("http/1.1 200 "):
        raise RuntimeError(f"{head.splitlines()[0]}: {body.decode()}")
    answer: dict[str, str] = json.loads(body)
    return answer
