"""Bodies too large for memory: downloads with ETag and Range, uploads in pieces."""

import asyncio
import base64
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import iterate_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from server.core.errors import InvalidInput
from server.service.context import Context
from server.store import blobs
from server.store.tables import Blob
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


def send_blob(request: Request, ctx: Context, blob: Blob | bytes) -> Response:
    """Return a response with the blob, or with bytes that are not stored, and their digest as ETag.

    Supports If-None-Match, Range, If-Range, and either media type in Accept.
    """
    accepted = request.headers.get("accept", "")
    media_type = ANY_BYTES if ANY_BYTES in accepted and MEDIA_TYPE not in accepted else MEDIA_TYPE
    size, sha256 = (len(blob), digest(blob)) if isinstance(blob, bytes) else (blob.size_bytes, blob.digest or "")
    etag = f'"{sha256}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Repr-Digest": digest_header(sha256),
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
    if isinstance(blob, bytes):
        return Response(blob[begin:end], status, headers, media_type=media_type)
    body = _in_small_pieces(blobs.read(ctx.db, blob.id, begin, end))
    return StreamingResponse(body, status, headers, media_type=media_type)


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


async def read_pieces(
    request: Request, piece_bytes: Callable[[], int], idle_s: float, flush_s: float
) -> AsyncIterator[bytes]:
    """Yield the body in pieces of exactly `piece_bytes()`, or whatever arrived in `flush_s` seconds.

    If the body stops early, yield what has arrived, then raise UploadStalled.
    """
    arrived, clock = _Arrived(), asyncio.get_running_loop().time
    wanted, flush_at = piece_bytes(), clock() + flush_s
    stream = request.stream().__aiter__()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                arrived.add(await anext(stream))
        except StopAsyncIteration:
            break
        except (ClientDisconnect, TimeoutError) as error:
            if arrived.size_bytes:
                yield arrived.take(arrived.size_bytes)
            raise UploadStalled from error
        while arrived.size_bytes >= wanted or (arrived.size_bytes and clock() >= flush_at):
            yield arrived.take(wanted)
            wanted, flush_at = piece_bytes(), clock() + flush_s
    if arrived.size_bytes:
        yield arrived.take(arrived.size_bytes)


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
