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
from server.api.guard import guarded
from server.service import enrolment
from shared.http.openapi import problem_responses
from shared.schemas import ClassCountsPatch, ClientView, FederationPlanAnswer, JoinAnswer, JoinRequest

joining = APIRouter(tags=["clients"], route_class=guarded(authenticate_invited))
router = APIRouter(tags=["clients"], route_class=guarded(authenticate_caller))


@joining.get("/v1/join", responses=problem_responses(401, 403, 429))
async def preview_join(invited: InviteHolder) -> FederationPlanAnswer:
    """The plan behind an invite, to check the data against before joining; the invite stays unused."""
    return invited.answer


@joining.post(
    "/v1/join", status_code=HTTPStatus.CREATED, responses=problem_responses(401, 403, 409, 413, 415, 422, 429)
)
def join_federation(request: Request, ctx: Ctx, invited: InviteHolder, body: JoinRequest) -> JoinAnswer:
    """Enrol with an invite token as the bearer; answers with the client's id and token, shown this once."""
    return enrolment.join(ctx, invited.token, body, address_of(request), certificate_of(request))


@router.get("/v1/me", responses=problem_responses(401, 403, 429))
def get_me(ctx: Ctx, identity: ClientIdentity) -> ClientView:
    """The client's own record."""
    return enrolment.me(ctx, identity)


@router.patch("/v1/me", responses=problem_responses(401, 403, 413, 415, 422, 429))
def update_me(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller, body: ClassCountsPatch) -> ClientView:
    """New class counts, which take effect with the next round, and the number of held-out images."""
    return enrolment.update_counts(ctx, identity, caller.actor, body.class_counts, body.held_out_images)


@router.delete("/v1/me", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 429))
def leave_federation(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> None:
    """Leave; what was uploaded still counts."""
    enrolment.leave(ctx, identity, caller.actor)
