"""Joining, and what a client may do with its own record."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from server.api.access import (
    AnyCaller,
    ClientIdentity,
    Ctx,
    InviteHolder,
    address_of,
    authenticate_caller,
    authenticate_invited,
    certificate_of,
    protocol_of,
)
from server.api.guard import guarded
from server.service import enrolment
from shared.http.openapi import problem_responses
from shared.plan import ROUNDS_SETTINGS_SINCE
from shared.schemas import (
    Attempt,
    ClassCountsPatch,
    ClientView,
    FederationPlanAnswer,
    JoinAnswer,
    JoinRequest,
    StatusReport,
    TokenAnswer,
)

joining = APIRouter(tags=["clients"], route_class=guarded(authenticate_invited))
_ATTEMPT = Query(description="Of a join with this invite that is about to be repeated.")
router = APIRouter(tags=["clients"], route_class=guarded(authenticate_caller))


@joining.get("/v1/join", response_model=FederationPlanAnswer, responses=problem_responses(401, 403, 409, 422, 429))
def preview_join(
    request: Request, ctx: Ctx, invited: InviteHolder, attempt: Annotated[Attempt | None, _ATTEMPT] = None
) -> Response:
    """The plan behind an invite, to check the data against before joining; the invite stays unused."""
    return _readable(request, enrolment.preview(ctx, invited.token, attempt))


@joining.post(
    "/v1/join",
    status_code=HTTPStatus.CREATED,
    response_model=JoinAnswer,
    responses=problem_responses(401, 403, 409, 413, 415, 422, 429),
)
def join_federation(request: Request, ctx: Ctx, invited: InviteHolder, body: JoinRequest) -> Response:
    """Enrol with an invite token as the bearer; answers with the client's id and token, shown this once.

    The same `attempt` with the same invite may be sent again until the client's token is first used: the record is
    updated, and the answer has the same id and a new token.
    """
    answer = enrolment.join(ctx, invited.token, body, address_of(request), certificate_of(request))
    return _readable(request, answer, HTTPStatus.CREATED)


def _readable(
    request: Request, answer: FederationPlanAnswer | JoinAnswer, status: HTTPStatus = HTTPStatus.OK
) -> Response:
    """The answer without settings that agents of the caller's protocol reject, none of which is about their work."""
    later = {name for since, name in ROUNDS_SETTINGS_SINCE if since > protocol_of(request)}
    body = answer.model_dump_json(exclude={"plan": {"rounds": later}})
    return Response(body, status, media_type="application/json")


@router.get("/v1/me", responses=problem_responses(401, 403, 429))
def get_me(ctx: Ctx, identity: ClientIdentity) -> ClientView:
    """The client's own record."""
    return enrolment.me(ctx, identity)


@router.patch("/v1/me", responses=problem_responses(401, 403, 413, 415, 422, 429))
def update_me(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller, body: ClassCountsPatch) -> ClientView:
    """New class counts, which take effect with the next round, and the number of held-out images."""
    return enrolment.update_counts(ctx, identity, caller.actor, body.class_counts, body.held_out_images)


@router.put(
    "/v1/me/status", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 413, 415, 422, 429)
)
async def put_status(request: Request, ctx: Ctx, identity: ClientIdentity, report: StatusReport) -> None:
    """What this client's agent is doing and what troubles it; also its sign of life. Shown to the operator shortly."""
    request.app.state.heartbeats.note_report(identity.client_id, ctx.clock(), report)


@router.delete("/v1/me", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 429))
def leave_federation(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> None:
    """Leave; what was uploaded still counts."""
    enrolment.leave(ctx, identity, caller.actor)


@router.post("/v1/me/token", responses=problem_responses(401, 403, 429))
def renew_token(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> TokenAnswer:
    """A new token; the present one stays valid until the new one is first used. Asking again replaces the new one."""
    return enrolment.renew(ctx, identity, caller.actor)
