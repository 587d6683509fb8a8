"""Limits on request bodies: size, time to arrive, and total bytes in memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request

from client_agent.settings import ServeOptions
from client_agent.web.problems import ProblemError


@dataclass(eq=False)
class HeldBody:
    """How much of one request's body is in memory."""

    held_bytes: int = 0
    is_dropped: bool = False


class HeldBodies:
    """All bodies in memory, each from its first byte until its request is answered.

    When they no longer fit, the largest one still arriving is dropped, so that a few callers sending large bodies
    slowly cannot lock out the others. Not thread-safe: for the event loop only.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._free_bytes = options.max_held_bytes
        self._arriving: dict[HeldBody, asyncio.Timeout] = {}

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """Register an empty body, and release its bytes at the end of the block."""
        body = HeldBody()
        try:
            yield body
        finally:
            self._free_bytes += body.held_bytes

    @asynccontextmanager
    async def receive(self, request: Request, body: HeldBody) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Yield the body's pieces; raise ProblemError if it is too large, too slow, dropped or cut off."""
        try:
            async with asyncio.timeout(self._options.body_s) as timeout:
                self._arriving[body] = timeout
                yield self._pieces(request, body)
        except TimeoutError:
            raise _busy() if body.is_dropped else self._too_slow() from None
        except ClientDisconnect:  # nobody will read the answer
            raise ProblemError(
                HTTPStatus.BAD_REQUEST, "incomplete", "The connection closed before the whole body arrived."
            ) from None
        finally:
            self._arriving.pop(body, None)
        if body.is_dropped:  # just as its last piece arrived
            raise _busy()

    async def _pieces(self, request: Request, body: HeldBody) -> AsyncGenerator[bytes, None]:
        async for piece in request.stream():
            self._take(body, len(piece))
            yield piece

    def _take(self, body: HeldBody, count: int) -> None:
        if body.is_dropped:
            raise _busy()
        body.held_bytes += count
        self._free_bytes -= count
        if body.held_bytes > self._options.max_body_bytes:
            raise too_large(self._options.max_body_bytes)
        while self._free_bytes < 0:
            largest = max(self._arriving, key=lambda one: one.held_bytes)
            self._drop(largest)
            if largest is body:
                raise _busy()

    def _drop(self, body: HeldBody) -> None:
        self._free_bytes += body.held_bytes
        body.held_bytes, body.is_dropped = 0, True
        self._arriving.pop(body).reschedule(0)  # wakes the task waiting for the next piece

    def _too_slow(self) -> ProblemError:
        return ProblemError(
            HTTPStatus.REQUEST_TIMEOUT,
            "body-too-slow",
            f"The body did not arrive within {self._options.body_s:g} s.",
            "Send fewer or smaller images per request.",
        )


def too_large(max_bytes: int) -> ProblemError:
    """Return the problem for a body over the limit."""
    return ProblemError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "too-large",
        f"A request may have at most {max_bytes} bytes.",
        "Send fewer or smaller images per request.",
    )


def _busy() -> ProblemError:
    return ProblemError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "busy",
        "The agent is out of memory for requests; this body was the largest one still arriving.",
        "Try again with fewer or smaller images per request.",
        {"Retry-After": "1"},
    )
