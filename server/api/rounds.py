"""What agents call in a round: task, model, personal tensors, update, evaluation."""

import asyncio
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from server.api.access import ClientIdentity, Ctx, authenticate_caller, protocol_of
from server.api.errors import TENSORS, problem_responses
from server.api.guard import guarded
from server.api.limits import DOWNLOAD, UPLOAD, LimitsOf
from server.api.streaming import MEDIA_TYPE, parse_digest, pieces, send_blob
from server.service import evaluations, tasks, uploads
from server.store.blobs import CHUNK_BYTES
from shared.evaluation import Evaluation
from shared.http.problems import problem
from shared.schemas import TaskAnswer, UpdateReceipt

router = APIRouter(tags=["rounds"], route_class=guarded(authenticate_caller))
IDLE_S = 60.0
REPORTING = 1  # agents of this protocol and later ones report while they train
FLUSH_S = 5.0  # on a slow link bytes are stored at least so often: the round must see that they still come
MAX_WAIT_S = 60.0
_BODY = {"requestBody": {"required": True, "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}}
_REFUSALS = problem_responses(401, 403, 404, 408, 409, 410, 413, 415, 422, 429)
RoundId = Annotated[int, Path(ge=0, lt=2**31)]  # what the database can look for
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


@router.head("/v1/rounds/{round_id}/model", include_in_schema=False)
@router.get(
    "/v1/rounds/{round_id}/model",
    dependencies=[DOWNLOAD],
    response_class=Response,
    responses=TENSORS | problem_responses(401, 403, 404, 410, 416, 422, 429),
)
def get_model(request: Request, ctx: Ctx, identity: ClientIdentity, round_id: RoundId) -> Response:
    """The global model that the round starts from."""
    return send_blob(request, ctx, tasks.round_model(ctx, identity, round_id))


@router.head("/v1/rounds/{round_id}/personal", include_in_schema=False)
@router.get(
    "/v1/rounds/{round_id}/personal",
    dependencies=[DOWNLOAD],
    response_class=Response,
    responses=TENSORS | problem_responses(401, 403, 404, 410, 416, 422, 429),
)
async def get_personal(
    request: Request, ctx: Ctx, identity: ClientIdentity, limits: LimitsOf, round_id: RoundId
) -> Response:
    """This client's own tensors for the round, such as its offset; never another's."""
    blob = await limits.in_personal_thread(tasks.round_personal, ctx, identity, round_id)
    return await run_in_threadpool(send_blob, request, ctx, blob)


@router.put("/v1/rounds/{round_id}/update", dependencies=[UPLOAD], responses=_REFUSALS, openapi_extra=_BODY)
async def put_update(
    request: Request,
    ctx: Ctx,
    identity: ClientIdentity,
    round_id: RoundId,
    content_digest: Annotated[str | None, Header(description="sha-256=:BASE64: of the body.")] = None,
) -> UpdateReceipt:
    """Upload this client's update in one go. The same body again is answered in the same way."""
    digest = parse_digest(content_digest, "Content-Digest")
    length = _declared_length(request)
    upload = await run_in_threadpool(uploads.Upload, ctx, identity, round_id, digest, length)
    try:
        async for piece in pieces(request, CHUNK_BYTES, IDLE_S, FLUSH_S):
            await run_in_threadpool(upload.feed, piece)
        return await run_in_threadpool(upload.finish)
    except BaseException:  # torn, stalled, invalid, or the server stops: nothing of it may stay
        await asyncio.shield(run_in_threadpool(upload.abandon))
        raise


@router.head("/v1/rounds/{round_id}/update", responses=problem_responses(401, 403, 404, 410, 422, 429))
def head_update(ctx: Ctx, identity: ClientIdentity, round_id: RoundId) -> Response:
    """How much of a resumable upload is stored, in Upload-Offset."""
    return Response(headers=_status_headers(uploads.status(ctx, identity, round_id)))


@router.patch(
    "/v1/rounds/{round_id}/update",
    dependencies=[UPLOAD],
    responses=_REFUSALS | {204: {"description": "Stored; more to come."}, 200: {"model": UpdateReceipt}},
    openapi_extra=_BODY,
)
async def patch_update(
    request: Request,
    ctx: Ctx,
    identity: ClientIdentity,
    round_id: RoundId,
    upload_offset: Annotated[int, Header(ge=0, lt=2**63, description="Where this part begins.")],
    upload_length: Annotated[int, Header(ge=1, lt=2**63, description="Bytes of the whole upload.")],
    repr_digest: Annotated[str, Header(description="sha-256=:BASE64: of the whole upload.")],
) -> Response:
    """Append to a resumable upload; the last part, if the whole is valid, is answered with the receipt."""
    digest = parse_digest(repr_digest, "Repr-Digest") or ""
    part = await run_in_threadpool(uploads.UploadPart, ctx, identity, round_id, upload_offset, upload_length, digest)
    async for piece in pieces(request, CHUNK_BYTES, IDLE_S, FLUSH_S):
        await run_in_threadpool(part.feed, piece)
    result = await run_in_threadpool(part.finish)
    if isinstance(result, uploads.UploadStatus):
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=_status_headers(result))
    complete = uploads.UploadStatus(result.size_bytes, result.size_bytes, complete=True)
    return JSONResponse(result.model_dump(), headers=_status_headers(complete))


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


def _status_headers(status: uploads.UploadStatus) -> dict[str, str]:
    headers = {
        "Upload-Offset": str(status.offset_bytes),
        "Upload-Complete": "?1" if status.complete else "?0",
        "Cache-Control": "no-store",
    }
    if status.length_bytes is not None:
        headers["Upload-Length"] = str(status.length_bytes)
    return headers


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
