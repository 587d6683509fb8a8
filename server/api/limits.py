"""How many requests a caller may have in progress in this process, and which threads slow work may use.

Most work runs in one of the 40 threads of Starlette's pool. Reading history and creating personal tensors can take
long, so they have a few threads to themselves: polls and uploads always find a free one.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Annotated, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.responses import StreamingResponse

from server.api.access import AnyCaller, Caller, ClientIdentity
from server.core.errors import TooMany
from server.service.settings import Settings
from server.store.blobs import CHUNK_BYTES

ADMIN_FACTOR = 8  # the operator's scripts and dashboards get this many times a client's limit
BODIES_PER_CALLER = 4  # JSON bodies of up to max_json_bytes each
_UPLOAD_BUFFERS_BYTES = 32 * 1024 * 1024  # of all uploads together, so that memory does not grow with their number
_LEAST_PIECE_BYTES = 256 * 1024
_HISTORY_THREADS = 2
_PERSONAL_THREADS = 8
T = TypeVar("T")


class ConcurrencyLimit:
    """Slots per key, such as a client's id. A limit of 0 means no limit. For use in the event loop only."""

    def __init__(self, limit: int, code: str, message: str, *, retry_after_s: int = 5) -> None:
        self._limit, self._code, self._message, self._retry_after_s = limit, code, message, retry_after_s
        self._held: Counter[Hashable] = Counter()

    @property
    def held(self) -> int:
        """How many slots of all keys are occupied."""
        return self._held.total()

    @asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[None]:
        """Occupy a slot; raise TooMany with the code and message if all are taken."""
        if self._limit and self._held[key] >= self._limit:
            raise TooMany(self._code, self._message, retry_after_s=self._retry_after_s)
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]


class OpenPolls:
    """The long polls of each client. When a client opens one too many, its oldest one ends.

    No poll is rejected: an agent that lost its connection must not be locked out by the poll it left behind.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[Hashable, OrderedDict[asyncio.Future[None], None]] = {}

    @contextmanager
    def begin(self, key: Hashable) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done once this poll must make room for a newer one."""
        displaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        polls = self._open.setdefault(key, OrderedDict())
        polls[displaced] = None
        if self._limit and len(polls) > self._limit:
            polls.popitem(last=False)[0].set_result(None)
        try:
            yield displaced
        finally:
            polls.pop(displaced, None)
            displaced.cancel()
            if not polls:
                self._open.pop(key, None)


class _PerCaller:
    """Slots per client, and more for the operator."""

    def __init__(self, limit: int, code: str, what: str) -> None:
        self._clients, self._admin = (
            ConcurrencyLimit(slots, code, f"One token may have {slots} {what} in progress at a time.")
            for slots in (limit, limit * ADMIN_FACTOR)
        )

    def hold(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        return (self._admin if caller.identity is None else self._clients).hold(caller.only_client)


class Limits:
    """The limits of one process. A setting of 0 means no limit."""

    def __init__(self, settings: Settings) -> None:
        self.polls = OpenPolls(settings.polls_per_client)
        self.bodies = ConcurrencyLimit(
            BODIES_PER_CALLER, "too-many-bodies", f"One caller may send {BODIES_PER_CALLER} JSON bodies at a time."
        )
        uploads = settings.uploads_per_client
        self.uploads = ConcurrencyLimit(
            uploads, "too-many-uploads", f"One client may have {uploads} uploads in progress."
        )
        self.downloads = _PerCaller(settings.downloads_per_client, "too-many-downloads", "downloads")
        self.history = _PerCaller(settings.history_reads_per_client, "too-many-history-reads", "history reads")
        self._history_threads = anyio.CapacityLimiter(_HISTORY_THREADS)
        self._personal_threads = anyio.CapacityLimiter(_PERSONAL_THREADS)

    def upload_piece_bytes(self) -> int:
        """Return how many bytes of an upload to collect before they are stored: a chunk, or less if there are many."""
        share = _UPLOAD_BUFFERS_BYTES // max(1, self.uploads.held)
        return min(CHUNK_BYTES, max(_LEAST_PIECE_BYTES, share))

    async def in_history_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run a function that reads history."""
        return await run_sync(function, *args, limiter=self._history_threads)

    async def in_personal_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run a function that may have to load a federation's private state."""
        return await run_sync(function, *args, limiter=self._personal_threads)

    async def stream(self, pages: Iterator[bytes], media_type: str) -> StreamingResponse:
        """Stream pages as history threads produce them. Errors before the first page get a normal error response."""
        first = await self.in_history_thread(next, pages, None)

        async def body() -> AsyncIterator[bytes]:
            page = first
            while page is not None:
                yield page
                page = await self.in_history_thread(next, pages, None)

        return StreamingResponse(body(), media_type=media_type)


async def get_limits(request: Request) -> Limits:
    """Return the limits of this process."""
    return request.app.state.limits  # type: ignore[no-any-return]


LimitsOf = Annotated[Limits, Depends(get_limits)]


async def _download_slot(request: Request, caller: AnyCaller, limits: LimitsOf) -> AsyncIterator[None]:
    """Hold a slot until the last byte is sent. HEAD has no body and needs none."""
    if request.method == "HEAD":
        yield
        return
    async with limits.downloads.hold(caller):
        yield


async def _upload_slot(identity: ClientIdentity, limits: LimitsOf) -> AsyncIterator[None]:
    async with limits.uploads.hold(identity.client_id):
        yield


async def _history_slot(caller: AnyCaller, limits: LimitsOf) -> AsyncIterator[None]:
    async with limits.history.hold(caller):
        yield


UPLOAD = Depends(_upload_slot, scope="function")  # released when the response is sent
DOWNLOAD = Depends(_download_slot)
HISTORY = Depends(_history_slot)
