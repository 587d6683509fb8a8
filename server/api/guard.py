"""Checks before a request body is read: who is calling, how often, and how large the body is.

FastAPI reads and parses a body before it runs any dependency. Routes of the class returned by `guarded` authenticate
the caller first, so that nobody without a token gets a body parsed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message
from typing_extensions import override

from server.api.access import Authenticated, address_of, bearer_token, require_protocol
from server.core.errors import NotAuthenticated, TooLarge, TooMany
from server.service.settings import Settings
from shared.http.problems import problem

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Shortcut = Callable[[Request], Awaitable[Response | None]]
Authenticator = Callable[[Request, str], Awaitable[Authenticated]]


def with_shortcut(shortcut: Shortcut) -> Callable[[Endpoint], Endpoint]:
    """Let `shortcut` answer the requests of an endpoint that it returns a response for, and FastAPI all others.

    For the calls that agents make all the time: FastAPI takes longer to read and check their parameters than the
    endpoint takes to respond. A shortcut knows the form in which agents send them, and leaves any other form, as well
    as anything that may be wrong, to FastAPI.
    """

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.shortcut = shortcut  # type: ignore[attr-defined]  # found again in `guarded`
        return endpoint

    return mark


def guarded(authenticate: Authenticator) -> type[APIRoute]:
    """Return a route class for callers `authenticate` accepts; dependencies find them in `request.state.caller`."""

    class Guarded(APIRoute):
        @override
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            takes_json = self.body_field is not None
            shortcut: Shortcut | None = getattr(self.endpoint, "shortcut", None)

            async def guard(request: Request) -> Response:
                await admit(request, authenticate)
                if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
                    return _encoded()
                if shortcut is not None and (response := await shortcut(request)) is not None:
                    return response
                if not takes_json:
                    return await handle(request)
                try:
                    async with request.app.state.limits.bodies.hold(request.state.caller.key):
                        body = await _read(request, _settings(request).max_json_bytes)
                except TimeoutError:
                    return _too_slow(_settings(request).json_body_s)
                except ClientDisconnect:  # nobody is left to read a response
                    return Response(status_code=HTTPStatus.BAD_REQUEST)
                return await handle(_with_body(request, body))

            return guard

    return Guarded


async def admit(request: Request, authenticate: Authenticator) -> None:
    """Authenticate the caller and store it in `request.state.caller`."""
    token, state = bearer_token(request.headers), request.app.state
    if token is None:
        raise NotAuthenticated(
            "no-token", "This call requires a token.", next_step="Send it as Authorization: Bearer TOKEN."
        )
    async with state.throttle.attempt(address_of(request), token):
        caller = await authenticate(request, token)
    if wait_s := state.requests.spend(caller.key):
        message = f"One caller may make {state.requests.per_s:g} requests per second."
        raise TooMany("too-many-requests", message, retry_after_s=wait_s)
    if caller.is_agent:
        require_protocol(request)
    request.state.caller = caller


def _settings(request: Request) -> Settings:
    return request.app.state.settings  # type: ignore[no-any-return]


async def _read(request: Request, max_bytes: int) -> bytes:
    """Return the body. Raise TooLarge for its Content-Length or as it arrives, and TimeoutError if it is too slow."""
    error = TooLarge("too-large", f"The body exceeds {max_bytes} bytes.")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise error
    body = bytearray()
    async with asyncio.timeout(_settings(request).json_body_s):
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise error
    return bytes(body)


def _with_body(request: Request, body: bytes) -> Request:
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            return await request.receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


def _encoded() -> Response:
    """Reject an encoded body: a compressed one could unpack to far more than any limit allows."""
    return problem(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "encoded-body",
        "Bodies must not be compressed or otherwise encoded.",
        next_step="Send the body uncompressed, without Content-Encoding.",
        headers={"Accept-Encoding": "identity"},
    )


def _too_slow(limit_s: float) -> Response:
    return problem(
        HTTPStatus.REQUEST_TIMEOUT,
        "body-too-slow",
        f"The body did not arrive within {limit_s:g} s.",
        next_step="Send it again.",
    )
