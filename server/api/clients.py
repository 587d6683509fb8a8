"""Joining with an invite, and a client's own record."""

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
    require_protocol,
)
from server.api.guard import guarded
from server.service import client_tokens, clients, enrollment
from shared.contract.messages import (
    Attempt,
    ClassCountsPatch,
    ClientView,
    FederationPlanAnswer,
    JoinAnswer,
    JoinRequest,
    StatusReport,
    TokenAnswer,
)
from shared.contract.plan import settings_to_hide
from shared.http.openapi import problem_responses

joining = APIRouter(tags=["clients"], route_class=guarded(authenticate_invited))
_ATTEMPT = Query(description="The `attempt` of a join with this invite that is about to be repeated.")
router = APIRouter(tags=["clients"], route_class=guarded(authenticate_caller))


@joining.get("/v1/join", response_model=FederationPlanAnswer, responses=problem_responses(401, 403, 409, 422, 429))
def preview_join(
    request: Request, ctx: Ctx, invited: InviteHolder, attempt: Annotated[Attempt | None, _ATTEMPT] = None
) -> Response:
    """Return the plan behind an invite, to check the site's data before joining. The invite stays unused."""
    return _readable(request, enrollment.preview(ctx, invited.token, attempt))


@joining.post(
    "/v1/join",
    status_code=HTTPStatus.CREATED,
    response_model=JoinAnswer,
    responses=problem_responses(401, 403, 409, 413, 415, 422, 429),
)
def join_federation(request: Request, ctx: Ctx, invited: InviteHolder, body: JoinRequest) -> Response:
    """Enroll with an invite as the bearer token. Returns the client's id and its token, which is not shown again.

    The same `attempt` can be repeated with the same invite until the client's token is first used: it updates the
    record and returns the same id with a new token.
    """
    answer = enrollment.join(ctx, invited.token, body, address_of(request), certificate_of(request))
    return _readable(request, answer, HTTPStatus.CREATED)


def _readable(
    request: Request, answer: FederationPlanAnswer | JoinAnswer, status: HTTPStatus = HTTPStatus.OK
) -> Response:
    """Leave out settings that agents of the caller's protocol version would reject, and do not need."""
    hidden = settings_to_hide(answer.plan, require_protocol(request))
    body = answer.model_dump_json(exclude={"plan": hidden})
    return Response(body, status, media_type="application/json")


@router.get("/v1/me", responses=problem_responses(401, 403, 429))
def get_me(ctx: Ctx, identity: ClientIdentity) -> ClientView:
    """Return the client's own record."""
    return clients.own_record(ctx, identity)


@router.patch("/v1/me", responses=problem_responses(401, 403, 413, 415, 422, 429))
def update_me(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller, body: ClassCountsPatch) -> ClientView:
    """Update the client's class counts, effective from the next round, and its number of held-out images."""
    return clients.update_counts(ctx, identity, caller.actor, body.class_counts, body.held_out_images)


@router.put(
    "/v1/me/status", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 413, 415, 422, 429)
)
async def put_status(request: Request, ctx: Ctx, identity: ClientIdentity, report: StatusReport) -> None:
    """Report what the client's agent is doing and any trouble, for the operator. Also counts as a heartbeat."""
    request.app.state.heartbeats.note_report(identity.client_id, ctx.clock(), report)


@router.delete("/v1/me", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 429))
def leave_federation(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> None:
    """Leave the federation. Updates already uploaded still count."""
    clients.leave(ctx, identity, caller.actor)


@router.post("/v1/me/token", responses=problem_responses(401, 403, 429))
def renew_token(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> TokenAnswer:
    """Create a new token. The current one stays valid until the new one is first used; another call replaces it."""
    return client_tokens.renew(ctx, identity, caller.actor)
