"""The request bodies that the web service holds: how large, how slow, and how many bytes in all."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request

from client_agent.refusals import ProblemError
from client_agent.settings import ServeOptions


@dataclass(eq=False)
class Body:
    """What is held of one request's body."""

    held_bytes: int = 0
    is_dropped: bool = False


class Bodies:
    """All bodies that are held, each from its first byte until its request is answered.

    When they no longer fit, the largest one that is still arriving is dropped: a few callers that send large bodies
    slowly cannot keep out the others. Used from the event loop alone.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._free_bytes = options.max_held_bytes
        self._arriving: dict[Body, asyncio.Timeout] = {}

    @contextmanager
    def hold(self) -> Iterator[Body]:
        """Register a body that is still empty, and release its bytes at the end."""
        body = Body()
        try:
            yield body
        finally:
            self._free_bytes += body.held_bytes

    @asynccontextmanager
    async def receive(self, request: Request, body: Body) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Yield the body's pieces; ProblemError for one that is too large, late, dropped or cut off."""
        try:
            async with asyncio.timeout(self._options.body_s) as timeout:
                self._arriving[body] = timeout
                yield self._pieces(request, body)
        except TimeoutError:
            raise _busy() if body.is_dropped else self._too_slow() from None
        except ClientDisconnect:  # nobody reads the answer
            raise ProblemError(HTTPStatus.BAD_REQUEST, "incomplete", "The connection ended before the body.") from None
        finally:
            self._arriving.pop(body, None)
        if body.is_dropped:  # just as its last piece came
            raise _busy()

    async def _pieces(self, request: Request, body: Body) -> AsyncGenerator[bytes, None]:
        async for piece in request.stream():
            self._take(body, len(piece))
            yield piece

    def _take(self, body: Body, count: int) -> None:
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

    def _drop(self, body: Body) -> None:
        self._free_bytes += body.held_bytes
        body.held_bytes, body.is_dropped = 0, True
        self._arriving.pop(body).reschedule(0)  # wakes the task that waits for the next piece

    def _too_slow(self) -> ProblemError:
        return ProblemError(
            HTTPStatus.REQUEST_TIMEOUT,
            "body-too-slow",
            f"The body did not arrive within {self._options.body_s:g} s.",
            "Send fewer or smaller images per request.",
        )


def too_large(max_bytes: int) -> ProblemError:
    """A body of more bytes than a request may have."""
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
        "The agent holds as many bytes of requests as it may; this body was the largest one still arriving.",
        "Try again, with fewer or smaller images per request.",
        {"Retry-After": "1"},
    )
