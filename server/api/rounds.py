"""What agents call in a round: task, model, personal tensors, update, evaluation."""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from server.api.access import ClientIdentity, Ctx, authenticate_caller, protocol_of
from server.api.errors import problem_of
from server.api.guard import guarded
from server.api.limits import DOWNLOAD, UPLOAD, LimitsOf
from server.api.streaming import BINARY, MEDIA_TYPE, downloads, parse_digest, pieces, send_blob
from server.core.errors import InvalidInput
from server.service import evaluations, resumable_uploads, tasks
from server.service.resumable_uploads import InconsistentLength, UploadPart, UploadStatus
from server.service.uploads import Upload
from server.store.blobs import CHUNK_BYTES
from shared.evaluation import Evaluation
from shared.http.openapi import Responses, headers, problem_responses
from shared.http.problems import problem
from shared.schemas import TaskAnswer, UpdateReceipt

router = APIRouter(tags=["rounds"], route_class=guarded(authenticate_caller))
PARTIAL = "application/partial-upload"  # the draft's media type of a part
IDLE_S = 60.0
REPORTING = 1  # agents of this protocol and later ones report while they train
FLUSH_S = 5.0  # on a slow link bytes are stored at least so often: the round must see that they still come
MAX_WAIT_S = 60.0
_BODY = {"requestBody": {"required": True, "content": BINARY}}
_PART_BODY = {"requestBody": {"required": True, "content": BINARY | {PARTIAL: BINARY[MEDIA_TYPE]}}}
_REFUSALS = problem_responses(401, 403, 404, 408, 409, 410, 413, 415, 422, 429)
_PROGRESS = headers("Upload-Offset", "Upload-Complete", "Upload-Length", "Upload-Limit")
_PART_ANSWERS: Responses = _REFUSALS | {
    200: {"model": UpdateReceipt, "description": "The upload is whole, and accepted."} | _PROGRESS,
    204: {"description": "Stored; the upload is not complete."} | _PROGRESS,
    400: headers("Upload-Complete"),
    409: headers("Upload-Offset", "Upload-Complete"),
    413: headers("Upload-Limit"),
    422: headers("Upload-Complete"),
}
RoundId = Annotated[int, Path(ge=0, lt=2**31)]  # what the database can look for
UploadId = Annotated[str | None, Query(alias="upload", max_length=64, description="Part of the Location from POST.")]
UploadLength = Annotated[
    int | None, Header(ge=1, lt=2**63, description="Bytes of the whole upload. Needed once, in any of its requests.")
]
ReprDigest = Annotated[
    str | None,
    Header(description="sha-256=:BASE64: of the whole upload, in any of its requests. Recommended: it is checked."),
]
Completes = Annotated[str | None, Header(description="?1: the upload ends with this body. ?0: it does not.")]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for news.")]
After = Annotated[str, Query(max_length=64, description="The ticket of the last answer: wait until it changes.")]


@router.get("/v1/task", responses=problem_responses(401, 403, 409, 422, 429))
async def get_task(
    request: Request, ctx: Ctx, identity: ClientIdentity, limits: LimitsOf, wait: Wait = 30.0, after: After = ""
) -> TaskAnswer:
    """What this client should do now; waits for work or news up to `wait` seconds. Also its sign of life."""
    state, loop = request.app.state, asyncio.get_running_loop()
    can_report = protocol_of(request) >= REPORTING
    state.heartbeats.note(identity.client_id, ctx.clock(), can_report=can_report)
    give_up_at = loop.time() + wait
    with limits.polls.begin(identity.client_id) as displaced:
        while True:
            news = state.news.waiter(identity.federation_id)
            try:
                answer = await run_in_threadpool(tasks.task, ctx, identity)
                is_news = answer.ticket != after if after else answer.action in ("finished", "cancelled")
                left = give_up_at - loop.time()
                if answer.action == "train" or is_news or left <= 0 or state.news.closed:
                    if answer.round is not None:
                        state.heartbeats.note(identity.client_id, ctx.clock(), answer.round.id, can_report=can_report)
                    return answer
                await asyncio.wait({news, displaced}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                # Neither a client that keeps too many open nor a process that stops looks at the database again.
                if displaced.done() or state.news.closed:
                    return answer
            finally:
                news.cancel()


@router.head("/v1/rounds/{round_id}/model", dependencies=[DOWNLOAD], **downloads(410))
@router.get("/v1/rounds/{round_id}/model", dependencies=[DOWNLOAD], **downloads(410))
def get_round_model(request: Request, ctx: Ctx, identity: ClientIdentity, round_id: RoundId) -> Response:
    """The global model that the round starts from: one safetensors file, its tensors by their plain names."""
    return send_blob(request, ctx, tasks.round_model(ctx, identity, round_id))


@router.head("/v1/rounds/{round_id}/personal", dependencies=[DOWNLOAD], **downloads(410))
@router.get("/v1/rounds/{round_id}/personal", dependencies=[DOWNLOAD], **downloads(410))
async def get_round_personal(
    request: Request, ctx: Ctx, identity: ClientIdentity, limits: LimitsOf, round_id: RoundId
) -> Response:
    """This client's own tensors for the round, such as its offset; never another's."""
    blob = await limits.in_personal_thread(tasks.round_personal, ctx, identity, round_id)
    return await run_in_threadpool(send_blob, request, ctx, blob)


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
    round_id: RoundId,
    content_digest: Annotated[str | None, Header(description="sha-256=:BASE64: of the body.")] = None,
) -> UpdateReceipt:
    """Upload this client's update in one go. The same body again is answered in the same way.

    The body is one safetensors file. A tensor that is averaged has the name that it has in the round's model with the
    prefix `shared.`; one that is this client's own, such as its offset, has the prefix `personal.`. The file's metadata
    holds the training report as JSON under the key `report`: the schema TrainingReport.
    """
    digest = parse_digest(content_digest, "Content-Digest")
    length = _declared_length(request)
    upload = await run_in_threadpool(Upload, ctx, identity, round_id, digest, length)
    try:
        async for piece in pieces(request, CHUNK_BYTES, IDLE_S, FLUSH_S):
            await run_in_threadpool(upload.feed, piece)
        return await run_in_threadpool(upload.finish)
    except BaseException:  # torn, stalled, invalid, or the server stops: nothing of it may stay
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
    round_id: RoundId,
    upload_complete: Annotated[str, Header(pattern=r"^\?[01]$", description="?0, or ?1 if the body is the whole.")],
    upload_length: UploadLength = None,
    repr_digest: ReprDigest = None,
) -> Response:
    """Begin a resumable upload of an update, in the form of PUT's, with none, a part or all of its bytes.

    It takes the place of one under way. HEAD, PATCH and DELETE work on the URL in Location.
    """
    head = _PartHead(0, upload_length, repr_digest, upload_complete == "?1")
    part = await _open_part(request, ctx, identity, round_id, head, creates=True)
    answer = await _receive(request, part)
    if answer.status_code == HTTPStatus.NO_CONTENT:
        answer.status_code = HTTPStatus.CREATED
    if part.upload_id:
        answer.headers["Location"] = f"{request.scope['root_path']}/v1/rounds/{round_id}/update?upload={part.upload_id}"
    return answer


@router.head(
    "/v1/rounds/{round_id}/update",
    responses=problem_responses(401, 403, 404, 410, 422, 429) | {200: {"description": "How far it is."} | _PROGRESS},
)
def head_update(ctx: Ctx, identity: ClientIdentity, round_id: RoundId, upload: UploadId = None) -> Response:
    """How much of a resumable upload is stored: where the next PATCH should begin."""
    return Response(headers=_status_headers(resumable_uploads.status(ctx, identity, round_id, upload)))


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
    round_id: RoundId,
    upload_offset: Annotated[int, Header(ge=0, lt=2**63, description="Where this part begins.")],
    upload_complete: Completes = None,
    upload_length: UploadLength = None,
    repr_digest: ReprDigest = None,
    upload: UploadId = None,
) -> Response:
    """Append to a resumable upload; the last part, if the whole is valid, is answered with the receipt.

    At offset 0 it also begins an upload if none is under way. Without Upload-Complete the upload ends as soon as it
    has Upload-Length bytes.
    """
    is_last = {"?1": True, "?0": False}.get(upload_complete or "")  # the draft: ignore other values
    head = _PartHead(upload_offset, upload_length, repr_digest, is_last)
    part = await _open_part(request, ctx, identity, round_id, head, upload_id=upload)
    return await _receive(request, part)


@router.delete(
    "/v1/rounds/{round_id}/update",
    status_code=HTTPStatus.NO_CONTENT,
    responses=problem_responses(401, 403, 404, 409, 410, 422, 429),
)
def cancel_upload(ctx: Ctx, identity: ClientIdentity, round_id: RoundId, upload: UploadId = None) -> None:
    """Cancel the upload under way and drop its bytes. An update that was accepted stays."""
    resumable_uploads.cancel(ctx, identity, round_id, upload)


@router.put(
    "/v1/models/{number}/evaluation",
    status_code=HTTPStatus.NO_CONTENT,
    responses=problem_responses(401, 403, 404, 413, 415, 422, 429),
)
def put_evaluation(
    ctx: Ctx, identity: ClientIdentity, number: Annotated[int, Path(ge=0, lt=2**31)], result: Evaluation
) -> None:
    """What this client measured with a global model and its own offset on held-out data."""
    evaluations.submit(ctx, identity, number, result)


@dataclass(frozen=True)
class _PartHead:
    """What the headers of a resumable request say of its upload."""

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
            raise InconsistentLength(f"The body ends the upload at byte {end}; Upload-Length is {length}.")
        length = end
    return await run_in_threadpool(
        UploadPart, ctx, identity, round_id, head.offset, length, digest, is_last=head.is_last, **options
    )


async def _receive(request: Request, part: UploadPart) -> Response:
    """Store the body, and answer with the receipt or with how far the upload is."""
    async for piece in pieces(request, CHUNK_BYTES, IDLE_S, FLUSH_S):
        await run_in_threadpool(part.feed, piece)
    try:
        result = await run_in_threadpool(part.finish)
    except InvalidInput as error:
        answer = problem_of(error)
        answer.headers["Upload-Complete"] = "?1" if part.ends_upload else "?0"  # whether resuming could help
        return answer
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
    """The answer, if anybody still listens, to an upload whose bytes stopped coming."""
    return problem(
        HTTPStatus.REQUEST_TIMEOUT,
        "upload-stalled",
        f"No byte came for {IDLE_S:.0f} s, or the connection broke.",
        next_step="Send it again, or resume it with HEAD and PATCH.",
    )
