"""Request rates per caller, and a limit on the cost of requests with bad tokens.

Authenticated callers are counted by identity; before authentication, or without a token, by address.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.access import bearer_token
from server.api.limits import ConcurrencyLimit
from server.core.errors import NotAuthenticated, TooMany
from shared.http.addresses import address_key
from shared.http.problems import problem
from shared.http.rate_limiter import MAX_KEYS, RateLimiter

_TOO_MANY_FAILURES = "Too many requests with a bad token came from this address."


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()  # keeps tokens out of memory dumps


class FailureThrottle:
    """Limits the work an address with many recent bad tokens can cause.

    Tokens cannot be guessed, but looking them up costs time. Such an address gets one lookup at a time; its other
    requests are refused without one. Other callers at the same address are not affected: tokens that were valid at
    their last lookup always pass, and a new valid token passes once it is looked up.
    """

    def __init__(self, free_failures: int = 10, per_s: float = 0.5) -> None:
        self._failures = RateLimiter(per_s, free_failures)
        self._lookups = ConcurrencyLimit(1, "too-many-failures", _TOO_MANY_FAILURES, retry_after_s=math.ceil(1 / per_s))
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def was_good(self, token: str | None) -> bool:
        """Return whether the token was valid when this process last looked it up."""
        return token is not None and _digest(token) in self._good

    @asynccontextmanager
    async def attempt(self, address: str, token: str) -> AsyncIterator[None]:
        """Wrap the authentication of a token. Raise TooMany instead of NotAuthenticated after many failures."""
        address, key = address_key(address), _digest(token)
        async with AsyncExitStack() as stack:
            if key not in self._good and self._failures.wait_s(address):
                await stack.enter_async_context(self._lookups.hold(address))
            try:
                yield
            except NotAuthenticated as error:
                self._good.pop(key, None)
                if wait_s := self._failures.spend(address):
                    raise TooMany("too-many-failures", _TOO_MANY_FAILURES, retry_after_s=wait_s) from error
                raise
        self._good[key] = None
        self._good.move_to_end(key)
        if len(self._good) > MAX_KEYS:
            self._good.popitem(last=False)


class RateLimitMiddleware:
    """ASGI middleware before authentication: 429 for an address with too many requests without a known token.

    Also rejects requests with several Authorization headers: a proxy might act on a different one.
    """

    def __init__(self, app: ASGIApp, requests_per_s: float) -> None:
        self._app, self._budget = app, RateLimiter(requests_per_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        respond: ASGIApp = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            throttle: FailureThrottle = scope["app"].state.throttle
            if len(headers.getlist("authorization")) > 1:
                respond = problem(
                    HTTPStatus.BAD_REQUEST,
                    "repeated-authorization",
                    "The request has several Authorization headers.",
                    next_step="Send one token, as Authorization: Bearer TOKEN.",
                )
            elif wait_s := self._budget.spend(self._key(scope, throttle, bearer_token(headers))):
                respond = problem(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    "too-many-requests",
                    f"One token, or one address without a known token, may make {self._budget.per_s:g} requests per "
                    "second.",
                    next_step=f"Try again in {wait_s} s.",
                    headers={"Retry-After": str(wait_s)},
                )
        await respond(scope, receive, send)

    @staticmethod
    def _key(scope: Scope, throttle: FailureThrottle, token: str | None) -> str:
        """Count a known token separately: other callers at its address must not use up its requests."""
        if token is not None and throttle.was_good(token):
            return _digest(token).hex()
        return address_key((scope.get("client") or ("",))[0])
