"""What one caller may have under way in this process, and which threads slow work may use.

Whatever needs a thread takes one of the 40 in Starlette's pool. Reads of history and the making of personal tensors
can take long, so they have a few threads of their own: polls and uploads always find a free one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Annotated, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Depends, Request
from fastapi.responses import StreamingResponse

from server.api.access import AnyCaller, Caller, ClientIdentity
from server.api.concurrency import Concurrency
from server.settings import Settings

ADMIN_FACTOR = 8  # the operator's scripts and dashboards may do this many times what a client may
BODIES_PER_CALLER = 4  # JSON; each may have max_json_bytes
_HISTORY_THREADS = 2
_PERSONAL_THREADS = 8
T = TypeVar("T")


class Polls:
    """Long polls under way. When a client begins one too many, its oldest one is answered.

    None is rejected: an agent that lost its connection must not be locked out by the poll that it left behind.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way: dict[Hashable, OrderedDict[asyncio.Future[None], None]] = {}

    @contextmanager
    def begin(self, key: Hashable) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done once this poll has to make room for a newer one."""
        displaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        polls = self._under_way.setdefault(key, OrderedDict())
        polls[displaced] = None
        if self._limit and len(polls) > self._limit:
            polls.popitem(last=False)[0].set_result(None)
        try:
            yield displaced
        finally:
            polls.pop(displaced, None)
            displaced.cancel()
            if not polls:
                self._under_way.pop(key, None)


class _PerCaller:
    """Slots per client, and more of them for the operator."""

    def __init__(self, limit: int, code: str, what: str) -> None:
        self._clients, self._admin = (
            Concurrency(most, code, f"One token may have {most} {what} under way at a time.")
            for most in (limit, limit * ADMIN_FACTOR)
        )

    def hold(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        return (self._admin if caller.identity is None else self._clients).hold(caller.only_client)


class Limits:
    """The limits of one process. A setting of 0 means no limit."""

    def __init__(self, settings: Settings) -> None:
        self.polls = Polls(settings.polls_per_client)
        self.bodies = Concurrency(
            BODIES_PER_CALLER, "too-many-bodies", f"One caller may send {BODIES_PER_CALLER} JSON bodies at a time."
        )
        uploads = settings.uploads_per_client
        self.uploads = Concurrency(uploads, "too-many-uploads", f"One client may have {uploads} uploads under way.")
        self.downloads = _PerCaller(settings.downloads_per_client, "too-many-downloads", "downloads")
        self.history = _PerCaller(settings.history_reads_per_client, "too-many-history-reads", "reads of history")
        self._history_threads = anyio.CapacityLimiter(_HISTORY_THREADS)
        self._personal_threads = anyio.CapacityLimiter(_PERSONAL_THREADS)

    async def in_history_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run a read of history."""
        return await run_sync(function, *args, limiter=self._history_threads)

    async def in_personal_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run what may have to load a federation's private state first."""
        return await run_sync(function, *args, limiter=self._personal_threads)

    async def stream(self, pages: Iterator[bytes], media_type: str) -> StreamingResponse:
        """Send pages as history threads produce them. An error on the way to the first one is answered as usual."""
        first = await self.in_history_thread(next, pages, None)

        async def body() -> AsyncIterator[bytes]:
            page = first
            while page is not None:
                yield page
                page = await self.in_history_thread(next, pages, None)

        return StreamingResponse(body(), media_type=media_type)


async def get_limits(request: Request) -> Limits:
    """The process' limits."""
    return request.app.state.limits  # type: ignore[no-any-return]


LimitsOf = Annotated[Limits, Depends(get_limits)]


async def _download_slot(request: Request, caller: AnyCaller, limits: LimitsOf) -> AsyncIterator[None]:
    """Held until the last byte is sent; HEAD has no body to wait for."""
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


UPLOAD = Depends(_upload_slot, scope="function")  # the slot is free again when the answer is sent
DOWNLOAD = Depends(_download_slot)
HISTORY = Depends(_history_slot)
