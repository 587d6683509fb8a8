"""How much one token may ask of this process: requests a second, and uploads at a time."""

import hashlib
import math
import re
import time
from collections import Counter, OrderedDict
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.proxies import route_path
from shared.http.problems import problem

UPLOAD = re.compile(r"/v1/rounds/\d+/update")
_BURST_S = 10.0  # so many seconds' worth of requests may come at once
_MAX_TOKENS = 10_000
_UPLOAD_RETRY_S = 5


class RequestLimits:
    """ASGI middleware: 429 with Retry-After for a token that asks too much. A limit of 0 is none."""

    def __init__(self, app: ASGIApp, requests_per_s: float, uploads_per_client: int) -> None:
        self._app, self._rate, self._max_uploads = app, requests_per_s, uploads_per_client
        self._spent: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # requests that still count, as of when
        self._uploads: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        token = dict(scope["headers"]).get(b"authorization") if scope["type"] == "http" else None
        if token is None:
            await self._app(scope, receive, send)
            return
        key = hashlib.sha256(token).digest()  # nothing to be found in a dump of the memory
        wait_s = self._wait_s(key)
        if wait_s:
            refusal = problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too-many-requests",
                f"One token may make {self._rate:g} requests a second.",
                next_step="Wait as long as Retry-After says; GET /v1/task waits for news by itself.",
                headers={"Retry-After": str(wait_s)},
            )
            await refusal(scope, receive, send)
        elif self._max_uploads and scope["method"] in ("PUT", "PATCH") and UPLOAD.fullmatch(route_path(scope)):
            await self._upload(key, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _wait_s(self, key: bytes) -> int:
        """Seconds until this token may ask again; 0: now, and it has been counted."""
        if not self._rate:
            return 0
        now, capacity = time.monotonic(), max(1.0, self._rate * _BURST_S)
        spent, since = self._spent.pop(key, (0.0, now))
        spent = max(0.0, spent - (now - since) * self._rate)
        allowed = spent + 1 <= capacity
        self._spent[key] = (spent + 1 if allowed else spent, now)
        if len(self._spent) > _MAX_TOKENS:
            self._spent.popitem(last=False)
        return 0 if allowed else max(1, math.ceil((spent + 1 - capacity) / self._rate))

    async def _upload(self, key: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        if self._uploads[key] >= self._max_uploads:
            refusal = problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too-many-uploads",
                f"One client may have {self._max_uploads} uploads under way.",
                next_step="Let the others end first.",
                headers={"Retry-After": str(_UPLOAD_RETRY_S)},
            )
            await refusal(scope, receive, send)
            return
        self._uploads[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._uploads[key] -= 1
            if not self._uploads[key]:
                del self._uploads[key]
