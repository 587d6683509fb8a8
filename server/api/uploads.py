"""Uploads of updates: in one PUT, or resumable as in the IETF draft."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from server.api.access import ClientIdentity, Ctx, authenticate_caller
from server.api.errors import problem_of
from server.api.guard import guarded
from server.api.limits import UPLOAD, LimitsOf
from server.api.rounds import RoundId
from server.api.streaming import BINARY, MEDIA_TYPE, UploadStalled, parse_digest, read_parts
from server.core.errors import InvalidInput
from server.service.uploads import resumable
from server.service.uploads.resumable import InconsistentLength, UploadPart, UploadStatus
from server.service.uploads.single_request import SingleRequestUpload
from shared.contract.errors import DistransError
from shared.contract.messages import UpdateReceipt
from shared.http.openapi import Responses, headers, problem_responses
from shared.http.problems import problem

router = APIRouter(tags=["rounds"], route_class=guarded(authenticate_caller))
PARTIAL = "application/partial-upload"  # the draft's media type for a part
IDLE_S = 60.0
FLUSH_S = 5.0  # how often bytes from a slow link are stored: the round must see that they keep coming
_BODY = {"requestBody": {"required": True, "content": BINARY}}
_PART_BODY = {"requestBody": {"required": True, "content": BINARY | {PARTIAL: BINARY[MEDIA_TYPE]}}}
_REFUSALS = problem_responses(401, 403, 404, 408, 409, 410, 413, 415, 422, 429)
_PROGRESS = headers("Upload-Offset", "Upload-Complete", "Upload-Length", "Upload-Limit")
_PART_ANSWERS: Responses = _REFUSALS | {
    200: {"model": UpdateReceipt, "description": "The upload is complete and accepted."} | _PROGRESS,
    204: {"description": "Stored; the upload is not complete."} | _PROGRESS,
    400: headers("Upload-Complete"),
    409: headers("Upload-Offset", "Upload-Complete"),
    413: headers("Upload-Limit"),
    422: headers("Upload-Complete"),
}
UploadId = Annotated[
    str | None, Query(alias="upload", max_length=64, description="From the Location that POST returned.")
]
UploadLength = Annotated[
    int | None,
    Header(ge=1, lt=2**63, description="Size of the whole upload in bytes. Required in one of its requests."),
]
ReprDigest = Annotated[
    str | None,
    Header(description="sha-256=:BASE64: of the whole upload, in any of its requests. Optional; checked if present."),
]
Completes = Annotated[str | None, Header(description="?1 if the upload ends with this body, else ?0.")]


@router.put(
    "/v1/rounds/{round_id}/update",
    dependencies=[UPLOAD],
    responses=_REFUSALS | {413: headers("Upload-Limit")},
    openapi_extra=_BODY,
)
async def put_update(
    request: Request,
    ctx: Ctx,
    identity: ClientIdentity,
    limits: LimitsOf,
    round_id: RoundId,
    content_digest: Annotated[str | None, Header(description="sha-256=:BASE64: of the body.")] = None,
) -> UpdateReceipt:
    """Upload this client's update in one request. Idempotent for the same body.

    The body is one safetensors file. Averaged tensors have the prefix `shared.` and their name in the round's model;
    personal ones, such as the offset, have the prefix `personal.`. The file's metadata contains the training report
    under the key `report`, as JSON of the schema TrainingReport.
    """
    digest = parse_digest(content_digest, "Content-Digest")
    length = _declared_length(request)
    upload = await run_in_threadpool(SingleRequestUpload, ctx, identity, round_id, digest, length)
    try:
        async for part in read_parts(request, limits.upload_piece_bytes, IDLE_S, FLUSH_S):
            if part.is_last:
                return await run_in_threadpool(upload.finish, part.data)
            await run_in_threadpool(upload.feed, part.data)
        raise UploadStalled
    except BaseException:  # broken, stalled, invalid, or the server stops: leave nothing behind
        await asyncio.shield(run_in_threadpool(upload.abandon))
        raise


@router.post(
    "/v1/rounds/{round_id}/update",
    dependencies=[UPLOAD],
    status_code=HTTPStatus.CREATED,
    response_class=Response,
    responses=_PART_ANSWERS
    | {201: {"description": "Created; the upload is not complete."} | headers("Location", *_PROGRESS["headers"])},
    openapi_extra=_PART_BODY,
)
async def create_upload(
    request: Request,
    ctx: Ctx,
    identity: ClientIdentity,
    limits: LimitsOf,
    round_id: RoundId,
    upload_complete: Annotated[
        str, Header(pattern=r"^\?[01]$", description="?1 if the body is the whole upload, else ?0.")
    ],
    upload_length: UploadLength = None,
    repr_digest: ReprDigest = None,
) -> Response:
    """Start a resumable upload of an update with none, some or all of its bytes; the format is the same as for PUT.

    It replaces an upload in progress. Use the URL in Location for HEAD, PATCH and DELETE.
    """
    head = _PartHead(0, upload_length, repr_digest, upload_complete == "?1")
    part = await _open_part(request, ctx, identity, round_id, head, creates=True)
    answer = await _receive(request, part, limits)
    if answer.status_code == HTTPStatus.NO_CONTENT:
        answer.status_code = HTTPStatus.CREATED
    if part.upload_id:
        answer.headers["Location"] = f"{request.scope['root_path']}/v1/rounds/{round_id}/update?upload={part.upload_id}"
    return answer


@router.head(
    "/v1/rounds/{round_id}/update",
    responses=problem_responses(401, 403, 404, 410, 422, 429)
    | {200: {"description": "The progress of the upload."} | _PROGRESS},
)
def head_update(ctx: Ctx, identity: ClientIdentity, round_id: RoundId, upload: UploadId = None) -> Response:
    """Return how many bytes of a resumable upload are stored, which is where the next PATCH starts."""
    return Response(headers=_status_headers(resumable.status(ctx, identity, round_id, upload)))


@router.patch(
    "/v1/rounds/{round_id}/update",
    dependencies=[UPLOAD],
    response_class=Response,
    responses=_PART_ANSWERS,
    openapi_extra=_PART_BODY,
)
async def patch_update(
    request: Request,
    ctx: Ctx,
    identity: ClientIdentity,
    limits: LimitsOf,
    round_id: RoundId,
    upload_offset: Annotated[int, Header(ge=0, lt=2**63, description="Where this part starts.")],
    upload_complete: Completes = None,
    upload_length: UploadLength = None,
    repr_digest: ReprDigest = None,
    upload: UploadId = None,
) -> Response:
    """Append to a resumable upload. After the last part of a valid update, the response is the receipt.

    At offset 0 this starts an upload if none is in progress. Without Upload-Complete, the upload is complete as soon
    as it has Upload-Length bytes.
    """
    is_last = {"?1": True, "?0": False}.get(upload_complete or "")  # the draft says to ignore other values
    head = _PartHead(upload_offset, upload_length, repr_digest, is_last)
    part = await _open_part(request, ctx, identity, round_id, head, upload_id=upload)
    return await _receive(request, part, limits)


@router.delete(
    "/v1/rounds/{round_id}/update",
    status_code=HTTPStatus.NO_CONTENT,
    responses=problem_responses(401, 403, 404, 409, 410, 422, 429),
)
def cancel_upload(ctx: Ctx, identity: ClientIdentity, round_id: RoundId, upload: UploadId = None) -> None:
    """Cancel the upload in progress and delete its bytes. An accepted update stays."""
    resumable.cancel(ctx, identity, round_id, upload)


@dataclass(frozen=True)
class _PartHead:
    """The upload headers of a resumable request."""

    offset: int
    length: int | None
    repr_digest: str | None
    is_last: bool | None


async def _open_part(
    request: Request, ctx: Ctx, identity: ClientIdentity, round_id: int, head: _PartHead, **options: Any
) -> UploadPart:
    digest, length = parse_digest(head.repr_digest, "Repr-Digest"), head.length
    content_length = _declared_length(request)
    if head.is_last and content_length is not None and head.offset + content_length > 0:
        end = head.offset + content_length
        if length not in (None, end):
            raise InconsistentLength(f"The body ends the upload at byte {end}, but Upload-Length is {length}.")
        length = end
    return await run_in_threadpool(
        UploadPart, ctx, identity, round_id, head.offset, length, digest, is_last=head.is_last, **options
    )


async def _receive(request: Request, part: UploadPart, limits: LimitsOf) -> Response:
    """Store the body and return the receipt, or the progress of the upload."""
    try:
        async for received in read_parts(request, limits.upload_piece_bytes, IDLE_S, FLUSH_S):
            await run_in_threadpool(part.feed, received.data, is_last=received.is_last)
    except (UploadStalled, DistransError):  # what was right so far can be resumed
        with suppress(DistransError):
            await run_in_threadpool(part.save)
        raise
    try:
        result = await run_in_threadpool(part.finish)
    except InvalidInput as error:
        response = problem_of(error)
        response.headers["Upload-Complete"] = "?1" if part.ends_upload else "?0"  # whether resuming could help
        return response
    if isinstance(result, UploadStatus):
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=_status_headers(result))
    complete = UploadStatus(result.size_bytes, result.size_bytes, complete=True, max_bytes=part.max_bytes)
    return JSONResponse(result.model_dump(), headers=_status_headers(complete))


def _status_headers(status: UploadStatus) -> dict[str, str]:
    found = {
        "Upload-Offset": str(status.offset_bytes),
        "Upload-Complete": "?1" if status.complete else "?0",
        "Upload-Limit": f"max-size={status.max_bytes}",
        "Cache-Control": "no-store",
    }
    if status.length_bytes is not None:
        found["Upload-Length"] = str(status.length_bytes)
    return found


def _declared_length(request: Request) -> int | None:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdigit() else None


def stalled(_request: Request, _error: Exception) -> Response:
    """Return the response to an upload whose bytes stopped arriving."""
    return problem(
        HTTPStatus.REQUEST_TIMEOUT,
        "upload-stalled",
        f"No data arrived for {IDLE_S:.0f} s, or the connection broke.",
        next_step="Send the update again, or resume it with HEAD and PATCH.",
    )
