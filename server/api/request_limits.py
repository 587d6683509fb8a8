"""How often callers may ask this process, and what strangers with bad tokens may cost it.

A caller is known by its identity once it is authenticated, and by its address before that or without a token.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.access import token_of
from server.api.concurrency import Concurrency
from server.core.errors import NotAuthenticated, TooMany
from shared.http.addresses import as_counted
from shared.http.problems import problem

_BURST_S = 10.0  # this many seconds' worth of requests may come at once
_TOO_MANY_FAILURES = "Too many requests with a bad token came from this address."
_MAX_KEYS = 10_000  # callers that are remembered; the ones that asked last


class Budget:
    """A token bucket per key: `per_s` requests per second, `burst` of them at once. A rate of 0 means no limit."""

    def __init__(self, per_s: float, burst: float | None = None) -> None:
        self.per_s = per_s
        self._burst = max(1.0, per_s * _BURST_S if burst is None else burst)
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests that still count, as of when

    def wait_s(self, key: str) -> int:
        """Return the seconds until this key may ask again; 0 means now."""
        if not self.per_s:
            return 0
        over = self._count(key) + 1 - self._burst
        return max(1, math.ceil(over / self.per_s)) if over > 0 else 0

    def spend(self, key: str) -> int:
        """Count a request unless it has to wait; return the seconds to wait."""
        wait_s = self.wait_s(key)
        if self.per_s and not wait_s:
            self._spent[key] = (self._count(key) + 1, time.monotonic())
            self._spent.move_to_end(key)
            if len(self._spent) > _MAX_KEYS:
                self._spent.popitem(last=False)
        return wait_s

    def _count(self, key: str) -> float:
        spent, since = self._spent.get(key, (0.0, 0.0))
        return max(0.0, spent - (time.monotonic() - since) * self.per_s)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()  # nothing to be found in a dump of the memory


class FailureThrottle:
    """Limits what an address with many recent bad tokens may cost.

    Tokens cannot be guessed; looking them up has a price, though. Such an address has one token at a time looked up,
    and everything else is refused before that. Callers who share the address with the culprit go on: tokens that were
    good the last time pass at any time, and a new one is found good as soon as it is looked up.
    """

    def __init__(self, free_failures: int = 10, per_s: float = 0.5) -> None:
        self._failures = Budget(per_s, free_failures)
        self._looking = Concurrency(1, "too-many-failures", _TOO_MANY_FAILURES, retry_after_s=math.ceil(1 / per_s))
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def was_good(self, token: str | None) -> bool:
        """Whether the token was good when this process last looked it up."""
        return token is not None and _digest(token) in self._good

    @asynccontextmanager
    async def attempt(self, address: str, token: str) -> AsyncIterator[None]:
        """Wrap the authentication of a token; raises TooMany instead of NotAuthenticated after many failures."""
        address, key = as_counted(address), _digest(token)
        async with AsyncExitStack() as stack:
            if key not in self._good and self._failures.wait_s(address):
                await stack.enter_async_context(self._looking.hold(address))
            try:
                yield
            except NotAuthenticated as error:
                self._good.pop(key, None)
                if wait_s := self._failures.spend(address):
                    raise TooMany("too-many-failures", _TOO_MANY_FAILURES, retry_after_s=wait_s) from error
                raise
        self._good[key] = None
        self._good.move_to_end(key)
        if len(self._good) > _MAX_KEYS:
            self._good.popitem(last=False)


class RequestLimits:
    """ASGI middleware, in front of authentication: 429 for an address that asks too often without a known token.

    Also refuses requests with several Authorization headers, which two readers could understand differently.
    """

    def __init__(self, app: ASGIApp, requests_per_s: float) -> None:
        self._app, self._budget = app, Budget(requests_per_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        answer: ASGIApp = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            throttle: FailureThrottle = scope["app"].state.throttle
            if len(headers.getlist("authorization")) > 1:
                answer = problem(
                    HTTPStatus.BAD_REQUEST,
                    "repeated-authorization",
                    "The request has several Authorization headers.",
                    next_step="Send one token, as Authorization: Bearer TOKEN.",
                )
            elif wait_s := self._budget.spend(self._key(scope, throttle, token_of(headers))):
                answer = problem(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too-many-requests",
                    f"One token, or one address without a known token, may make {self._budget.per_s:g} requests per "
                    "second.",
                    next_step=f"Try again in {wait_s} s.",
                    headers={"Retry-After": str(wait_s)},
                )
        await answer(scope, receive, send)

    @staticmethod
    def _key(scope: Scope, throttle: "FailureThrottle", token: str | None) -> str:
        """A known token has a budget of its own: others at its address must not use it up."""
        if token is not None and throttle.was_good(token):
            return _digest(token).hex()
        return as_counted((scope.get("client") or ("",))[0])
