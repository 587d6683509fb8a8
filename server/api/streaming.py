"""Bodies too large for memory: downloads with ETag and Range, uploads in pieces."""

import asyncio
import base64
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import iterate_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from server.core.errors import InvalidInput
from server.service.context import Context
from server.store import blobs
from server.store.tables import Blob
from shared.http.large_bodies import RECEIVE_BODY, SEND_BODY
from shared.http.openapi import Responses, headers, problem_responses, request_headers
from shared.http.problems import problem
from shared.tensors.wire import digest, digest_header

MEDIA_TYPE = "application/vnd.safetensors"
ANY_BYTES = "application/octet-stream"  # the only binary type some client generators know
_PIECE_BYTES = 256 * 1024
_RANGE = re.compile(r"^bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))$")
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")

# For the OpenAPI document:
BINARY = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (MEDIA_TYPE, ANY_BYTES)}
_BLOB = headers("ETag", "Accept-Ranges", "Repr-Digest")
_PART = headers("ETag", "Accept-Ranges", "Repr-Digest", "Content-Range")
_TENSORS: Responses = {
    200: {"content": BINARY, "description": "A safetensors file."} | _BLOB,
    206: {"content": BINARY, "description": "The requested range."} | _PART,
    304: {"description": "The body still matches If-None-Match."} | _BLOB,
}
_CONDITIONS = request_headers(
    Range="One range: `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`. GET only.",
    If_Range="An ETag. If it no longer matches, the whole body is sent instead of the range.",
    If_None_Match="ETags. If one of them matches, the response is 304 without a body.",
)


def download_options(*statuses: int) -> dict[str, Any]:
    """Return the options of a route that responds with `send_blob`, or with a problem of these further statuses."""
    refused = problem_responses(401, 403, 404, 416, 422, 429, *statuses) | {416: _PART}
    return {"response_class": Response, "responses": _TENSORS | refused, "openapi_extra": _CONDITIONS}


@dataclass(frozen=True)
class Stored:
    """What a response says about a blob."""

    blob_id: str
    size_bytes: int
    digest: str


def send_blob(request: Request, ctx: Context, blob: Blob | bytes) -> Response:
    """Return a response with the blob, or with bytes that are not stored, and their digest as ETag.

    Supports If-None-Match, Range, If-Range, and either media type in Accept.
    """
    if isinstance(blob, bytes):
        return respond(request, Stored("", len(blob), digest(blob)), lambda begin, end: MemoryResponse(blob[begin:end]))
    stored = Stored(blob.id, blob.size_bytes, blob.digest or "")

    def stream(begin: int, end: int) -> Response:
        return StreamingResponse(_in_small_pieces(blobs.read(ctx.db, stored.blob_id, begin, end)))

    return respond(request, stored, stream)


def respond(request: Request, blob: Stored, body: Callable[[int, int], Response]) -> Response:
    """Return the response that `body` creates for a span of the blob, with its status and headers; or one without."""
    accepted = request.headers.get("accept", "")
    media_type = ANY_BYTES if ANY_BYTES in accepted and MEDIA_TYPE not in accepted else MEDIA_TYPE
    size, etag = blob.size_bytes, f'"{blob.digest}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Repr-Digest": digest_header(blob.digest),
    }
    known = request.headers.get("if-none-match", "")
    if known.strip() == "*" or etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    begin, end, status = 0, size, HTTPStatus.OK
    wanted = request.headers.get("range", "") if request.headers.get("if-range", etag) == etag else ""
    if request.method == "GET" and (span := _span(wanted.strip(), size)):  # RFC 9110: GET only
        begin, end = span
        if begin >= end:
            headers["Content-Range"] = f"bytes */{size}"
            return problem(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                "range-not-satisfiable",
                f"The body has {size} bytes.",
                headers=headers,
            )
        status = HTTPStatus.PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    headers["Content-Length"] = str(end - begin)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    response = body(begin, end)
    response.status_code, response.media_type = status, media_type
    response.init_headers(headers)
    return response


def send_model(
    request: Request,
    ctx: Context,
    model: Stored,
    data: bytes | None,
    slot: AbstractAsyncContextManager[None] | None = None,
) -> Response:
    """Return a response like `send_blob`, from memory if its bytes are there; then hold `slot` while they are sent."""

    def body(begin: int, end: int) -> Response:
        if data is None:
            return StreamingResponse(_in_small_pieces(blobs.read(ctx.db, model.blob_id, begin, end)))
        return MemoryResponse(memoryview(data)[begin:end], slot)

    return respond(request, model, body)


class MemoryResponse(Response):
    """A response whose bytes others may be sending at the same time: none of them copies more than a few."""

    def __init__(self, data: bytes | memoryview, slot: AbstractAsyncContextManager[None] | None = None) -> None:
        """Hold `slot`, if any, until the last byte is sent."""
        super().__init__()
        self._data, self._slot = memoryview(data), slot or nullcontext()

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._slot:
            await self._send(scope, send)

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if send_body := scope.get("extensions", {}).get(SEND_BODY):
            await send_body(self._data)
        else:
            for begin in range(0, len(self._data), _PIECE_BYTES):
                piece = self._data[begin : begin + _PIECE_BYTES]
                await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _in_small_pieces(chunks: Iterator[bytes]) -> AsyncIterator[memoryview]:
    """Yield the same bytes in small pieces: the connection copies a piece it cannot send at once."""
    async for chunk in iterate_in_threadpool(chunks):
        view = memoryview(chunk)
        for begin in range(0, len(view), _PIECE_BYTES):
            yield view[begin : begin + _PIECE_BYTES]


def _span(wanted: str, size: int) -> tuple[int, int] | None:
    """Return [begin, end) of a byte range, empty if it lies outside; None if it is not a valid range, to be ignored."""
    match = _RANGE.match(wanted)
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix:
        return max(size - int(suffix), 0), size
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size


def parse_digest(header: str | None, name: str) -> str | None:
    """Return the hexadecimal SHA-256 in an RFC 9530 header; None if there is no header."""
    if header is None:
        return None
    match = _DIGEST.search(header)
    if match is None:
        raise InvalidInput(
            "unusable-digest",
            f"{name} does not contain a SHA-256.",
            next_step=f"Send {name}: sha-256=:BASE64: or leave it out.",
        )
    return base64.b64decode(match[1]).hex()


class UploadStalled(Exception):
    """The connection broke, or no byte arrived for too long."""


@dataclass(frozen=True)
class Part:
    """Bytes of a body, valid until the next ones are asked for."""

    data: bytes | memoryview
    is_last: bool  # the body ends with it


def read_parts(request: Request, part_bytes: Callable[[], int], idle_s: float, flush_s: float) -> AsyncIterator[Part]:
    """Yield the body in parts of exactly `part_bytes()`, or whatever arrived in `flush_s` seconds.

    The last one may be empty. If the body stops early, yield what has arrived, then raise UploadStalled.
    """
    if receive_body := request.scope.get("extensions", {}).get(RECEIVE_BODY):
        return _received(request, receive_body, part_bytes, idle_s, flush_s)
    return _from_messages(request, part_bytes, idle_s, flush_s)


async def _received(
    request: Request,
    receive_body: Callable[[memoryview, float], Awaitable[int]],
    part_bytes: Callable[[], int],
    idle_s: float,
    flush_s: float,
) -> AsyncIterator[Part]:
    """Let the connection write into a buffer of ours, which the next part overwrites."""
    left, clock = int(request.headers["content-length"]), asyncio.get_running_loop().time
    buffer, heard_at = memoryview(b""), clock()
    while left:
        if len(buffer) != (wanted := part_bytes()):
            buffer = memoryview(bytearray(wanted))
        try:
            count = await receive_body(buffer[:left], flush_s)
        except ConnectionResetError as error:
            raise UploadStalled from error
        if count:
            left, heard_at = left - count, clock()
            if not left:
                await request.body()  # returns at once; whoever watches the messages must see that it has ended
            yield Part(buffer[:count], is_last=not left)
        elif clock() >= heard_at + idle_s:
            raise UploadStalled


async def _from_messages(
    request: Request, part_bytes: Callable[[], int], idle_s: float, flush_s: float
) -> AsyncIterator[Part]:
    arrived, clock = _Arrived(), asyncio.get_running_loop().time
    wanted, flush_at = part_bytes(), clock() + flush_s
    stream = request.stream().__aiter__()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                arrived.add(await anext(stream))
        except StopAsyncIteration:
            break
        except (ClientDisconnect, TimeoutError) as error:
            if arrived.size_bytes:
                yield Part(arrived.take(arrived.size_bytes), is_last=False)
            raise UploadStalled from error
        while arrived.size_bytes > wanted or (arrived.size_bytes and clock() >= flush_at):
            yield Part(arrived.take(wanted), is_last=False)
            wanted, flush_at = part_bytes(), clock() + flush_s
    yield Part(arrived.take(arrived.size_bytes), is_last=True)


class _Arrived:
    """Bytes that have arrived, and are copied once on their way into a piece."""

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()
        self.size_bytes = 0

    def add(self, part: bytes) -> None:
        self._parts.append(memoryview(part))
        self.size_bytes += len(part)

    def take(self, most_bytes: int) -> bytes:
        """Remove and return the first bytes, at most `most_bytes`."""
        taken, left = [], min(most_bytes, self.size_bytes)
        self.size_bytes -= left
        while left:
            part = self._parts.popleft()
            if len(part) > left:
                self._parts.appendleft(part[left:])
                part = part[:left]
            taken.append(part)
            left -= len(part)
        return b"".join(taken)
