"""Bodies that are too large to hold: downloads with ETag and Range, uploads in pieces."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Iterator
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
from shared.wire import digest_header

MEDIA_TYPE = "application/vnd.safetensors"
ANY_BYTES = "application/octet-stream"  # the only binary type that some client generators know
_PIECE_BYTES = 256 * 1024
_RANGE = re.compile(r"^bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))$")
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")

# For the OpenAPI document
BINARY = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (MEDIA_TYPE, ANY_BYTES)}
_BLOB = headers("ETag", "Accept-Ranges", "Repr-Digest")
_PART = headers("ETag", "Accept-Ranges", "Repr-Digest", "Content-Range")
_TENSORS: Responses = {
    200: {"content": BINARY, "description": "A safetensors file."} | _BLOB,
    206: {"content": BINARY, "description": "The bytes that Range asked for."} | _PART,
    304: {"description": "The body is still the one that If-None-Match names."} | _BLOB,
}
_CONDITIONS = request_headers(
    Range="One range, as `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`. GET only.",
    If_Range="An ETag: the whole body is sent instead of the range if it is another one.",
    If_None_Match="ETags: 304 without a body if it is one of them.",
)


def downloads(*statuses: int) -> dict[str, Any]:
    """Return the options of a route that answers with `send_blob`, and with these further problems."""
    refused = problem_responses(401, 403, 404, 416, 422, 429, *statuses) | {416: _PART}
    return {"response_class": Response, "responses": _TENSORS | refused, "openapi_extra": _CONDITIONS}


def send_blob(request: Request, ctx: Context, blob: Blob) -> Response:
    """A blob with its digest as ETag; answers If-None-Match, Range, If-Range, and Accept with either media type."""
    accepted = request.headers.get("accept", "")
    media_type = ANY_BYTES if ANY_BYTES in accepted and MEDIA_TYPE not in accepted else MEDIA_TYPE
    etag = f'"{blob.digest}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Repr-Digest": digest_header(blob.digest or ""),
    }
    known = request.headers.get("if-none-match", "")
    if known.strip() == "*" or etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    begin, end, status = 0, blob.size_bytes, HTTPStatus.OK
    wanted = request.headers.get("range", "") if request.headers.get("if-range", etag) == etag else ""
    if request.method == "GET" and (span := _span(wanted.strip(), blob.size_bytes)):  # RFC 9110 knows no other method
        begin, end = span
        if begin >= end:
            headers["Content-Range"] = f"bytes */{blob.size_bytes}"
            return problem(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                "range-not-satisfiable",
                f"The body has {blob.size_bytes} bytes.",
                headers=headers,
            )
        status = HTTPStatus.PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{blob.size_bytes}"
    headers["Content-Length"] = str(end - begin)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    body = _in_small_pieces(blobs.read(ctx.db, blob.id, begin, end))
    return StreamingResponse(body, status, headers, media_type=media_type)


async def _in_small_pieces(chunks: Iterator[bytes]) -> AsyncIterator[memoryview]:
    """The same bytes; the connection copies a piece that it cannot send at once, and the next chunk is not yet read."""
    async for chunk in iterate_in_threadpool(chunks):
        view = memoryview(chunk)
        for begin in range(0, len(view), _PIECE_BYTES):
            yield view[begin : begin + _PIECE_BYTES]


def _span(wanted: str, size: int) -> tuple[int, int] | None:
    """[begin, end) of a byte range, empty when it lies outside; None for what is no range, which is ignored."""
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
    """The hexadecimal SHA-256 in an RFC 9530 header; None without one."""
    if header is None:
        return None
    match = _DIGEST.search(header)
    if match is None:
        raise InvalidInput(
            "unusable-digest", f"{name} has no SHA-256.", next_step=f"Send {name}: sha-256=:BASE64: or leave it out."
        )
    return base64.b64decode(match[1]).hex()


class Stalled(Exception):
    """No byte came for too long."""


async def pieces(request: Request, size: int, idle_s: float, flush_s: float) -> AsyncIterator[bytes]:
    """The body in pieces of about `size` bytes, or of what came in `flush_s` seconds when that is less.

    What had come when it was torn is still yielded, then it raises.
    """
    buffer, clock = bytearray(), asyncio.get_running_loop().time
    flush_at = clock() + flush_s
    stream = request.stream().__aiter__()
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream), idle_s)
        except StopAsyncIteration:
            break
        except (ClientDisconnect, TimeoutError) as error:
            if buffer:
                yield bytes(buffer)
            raise Stalled from error
        buffer += chunk
        if len(buffer) >= size or (buffer and clock() >= flush_at):
            yield bytes(buffer)
            buffer.clear()
            flush_at = clock() + flush_s
    if buffer:
        yield bytes(buffer)
