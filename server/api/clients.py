"""Joining, and what a client may do with its own record."""

from http import HTTPStatus

from fastapi import APIRouter, Request

from server.api.access import (
    AnyCaller,
    ClientIdentity,
    Ctx,
    InviteHolder,
    address_of,
    authenticate_caller,
    authenticate_invited,
    certificate_of,
)
from server.api.errors import problem_responses
from server.api.guard import guarded
from server.service import enrolment
from shared.schemas import ClassCountsPatch, ClientView, FederationPlanAnswer, JoinAnswer, JoinRequest, StatusReport

joining = APIRouter(tags=["clients"], route_class=guarded(authenticate_invited))
router = APIRouter(tags=["clients"], route_class=guarded(authenticate_caller))


@joining.get("/v1/join", responses=problem_responses(401, 403, 429))
async def preview(invited: InviteHolder) -> FederationPlanAnswer:
    """The plan behind an invite, to check the data against before joining; the invite stays unused."""
    return invited.answer


@joining.post(
    "/v1/join", status_code=HTTPStatus.CREATED, responses=problem_responses(401, 403, 409, 413, 415, 422, 429)
)
def join(request: Request, ctx: Ctx, invited: InviteHolder, body: JoinRequest) -> JoinAnswer:
    """Enrol with an invite token as the bearer; answers with the client's id and token, shown this once."""
    return enrolment.join(ctx, invited.token, body, address_of(request), certificate_of(request))


@router.get("/v1/me", responses=problem_responses(401, 403, 429))
def me(ctx: Ctx, identity: ClientIdentity) -> ClientView:
    """The client's own record."""
    return enrolment.me(ctx, identity)


@router.patch("/v1/me", responses=problem_responses(401, 403, 413, 415, 422, 429))
def patch_me(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller, body: ClassCountsPatch) -> ClientView:
    """New class counts, which take effect with the next round, and the number of held-out images."""
    return enrolment.update_counts(ctx, identity, caller.actor, body.class_counts, body.held_out_images)


@router.put(
    "/v1/me/status", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 413, 415, 422, 429)
)
async def put_status(request: Request, ctx: Ctx, identity: ClientIdentity, report: StatusReport) -> None:
    """What this client's agent is doing and what troubles it; also its sign of life. Shown to the operator shortly."""
    request.app.state.heartbeats.note_report(identity.client_id, ctx.clock(), report)


@router.delete("/v1/me", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 429))
def delete_me(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> None:
    """Leave; what was uploaded still counts."""
    enrolment.leave(ctx, identity, caller.actor)
