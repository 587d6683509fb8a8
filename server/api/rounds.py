"""An agent's calls in a round: its task, its personal tensors, its evaluation."""

import asyncio
import re
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from server.api.access import ClientIdentity, Ctx, authenticate_caller, require_protocol
from server.api.guard import guarded, with_shortcut
from server.api.limits import DOWNLOAD, Limits, LimitsOf
from server.api.streaming import download_options, send_blob
from server.api.task_desk import TaskDesk
from server.service.context import Context, Identity
from server.service.downloads import round_personal
from server.service.measurements import evaluations
from shared.contract.measurements import EvaluationReport
from shared.contract.messages import TaskAnswer
from shared.http.openapi import problem_responses

router = APIRouter(tags=["rounds"], route_class=guarded(authenticate_caller))
REPORTING_SINCE = 1  # agents of this protocol version and later report while they train
MAX_WAIT_S = 60.0
RoundId = Annotated[int, Path(ge=0, lt=2**31)]  # the database's range
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Maximum seconds to wait for a change.")]
After = Annotated[str, Query(max_length=64, description="The ticket of the last task: wait until it changes.")]


# A poll as agents send it.
_POLL = re.compile(rb"wait=(\d{1,2}(?:\.\d{1,3})?)&after=([A-Za-z0-9-]{0,64})")


async def _agents_poll(request: Request) -> Response | None:
    found, identity = _POLL.fullmatch(request.scope["query_string"]), request.state.caller.identity
    if found is None or identity is None or float(found[1]) > MAX_WAIT_S:
        return None
    return await _answer_poll(request, identity, float(found[1]), found[2].decode())


@router.get("/v1/task", responses=problem_responses(401, 403, 409, 422, 429), response_model=TaskAnswer)
@with_shortcut(_agents_poll)
async def get_task(request: Request, identity: ClientIdentity, wait: Wait = 30.0, after: After = "") -> Response:
    """Return what this client should do now, waiting up to `wait` seconds for a change. Also counts as a heartbeat."""
    return await _answer_poll(request, identity, wait, after)


async def _answer_poll(request: Request, identity: Identity, wait: float, after: str) -> Response:
    state, loop = request.app.state, asyncio.get_running_loop()
    ctx: Context = state.ctx
    desk: TaskDesk = state.desk
    limits: Limits = state.limits
    can_report = require_protocol(request) >= REPORTING_SINCE
    state.heartbeats.note(identity.client_id, ctx.clock(), can_report=can_report)
    give_up_at = loop.time() + wait
    with limits.polls.begin(identity.client_id) as displaced:
        while True:
            change = state.notifier.waiter(identity.federation_id)
            try:
                told = await desk.ask(identity)
                answer = told.answer
                has_changed = answer.ticket != after if after else answer.action in ("finished", "cancelled")
                left = give_up_at - loop.time()
                if answer.action == "train" or has_changed or left <= 0 or state.notifier.closed:
                    if answer.round is not None:
                        state.heartbeats.note(identity.client_id, ctx.clock(), answer.round.id, can_report=can_report)
                    return Response(told.body, media_type="application/json")
                await asyncio.wait({change, displaced}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                # Without a change the answer still holds, but for how long the others have been waited for. Also do not
                # read the database again for a client with too many polls, or while the process stops.
                if not change.done() or displaced.done() or state.notifier.closed:
                    return Response(told.body, media_type="application/json")
            finally:
                change.cancel()


@router.head("/v1/rounds/{round_id}/personal", dependencies=[DOWNLOAD], **download_options(410))
@router.get("/v1/rounds/{round_id}/personal", dependencies=[DOWNLOAD], **download_options(410))
async def get_round_personal(
    request: Request, ctx: Ctx, identity: ClientIdentity, limits: LimitsOf, round_id: RoundId
) -> Response:
    """Download this client's personal tensors for the round, such as its offset."""
    blob = await limits.in_personal_thread(round_personal, ctx, identity, round_id)
    return await run_in_threadpool(send_blob, request, ctx, blob)


@router.put(
    "/v1/models/{number}/evaluation",
    status_code=HTTPStatus.NO_CONTENT,
    responses=problem_responses(401, 403, 404, 413, 415, 422, 429),
)
def put_evaluation(
    ctx: Ctx, identity: ClientIdentity, number: Annotated[int, Path(ge=0, lt=2**31)], result: EvaluationReport
) -> None:
    """Submit what this client measured on its held-out data with a global model and its own offset.

    `paired` also says how the model that the site serves did compared with one trained on its own images only.
    """
    evaluations.submit(ctx, identity, number, result)
