"""Joining, and what a client may do with its own record."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request

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
from shared.schemas import (
    Attempt,
    ClassCountsPatch,
    ClientView,
    FederationPlanAnswer,
    JoinAnswer,
    JoinRequest,
    TokenAnswer,
)

joining = APIRouter(tags=["clients"], route_class=guarded(authenticate_invited))
_ATTEMPT = Query(description="Of a join with this invite that is about to be repeated.")
router = APIRouter(tags=["clients"], route_class=guarded(authenticate_caller))


@joining.get("/v1/join", responses=problem_responses(401, 403, 422, 429))
def preview(
    ctx: Ctx, invited: InviteHolder, attempt: Annotated[Attempt | None, _ATTEMPT] = None
) -> FederationPlanAnswer:
    """The plan behind an invite, to check the data against before joining; the invite stays unused."""
    return enrolment.preview(ctx, invited.token, attempt)


@joining.post(
    "/v1/join", status_code=HTTPStatus.CREATED, responses=problem_responses(401, 403, 409, 413, 415, 422, 429)
)
def join(request: Request, ctx: Ctx, invited: InviteHolder, body: JoinRequest) -> JoinAnswer:
    """Enrol with an invite token as the bearer; answers with the client's id and token, shown this once.

    The same `attempt` with the same invite may be sent again until the client's token is first used: the record is
    updated, and the answer has the same id and a new token.
    """
    return enrolment.join(ctx, invited.token, body, address_of(request), certificate_of(request))


@router.get("/v1/me", responses=problem_responses(401, 403, 429))
def me(ctx: Ctx, identity: ClientIdentity) -> ClientView:
    """The client's own record."""
    return enrolment.me(ctx, identity)


@router.patch("/v1/me", responses=problem_responses(401, 403, 413, 415, 422, 429))
def patch_me(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller, body: ClassCountsPatch) -> ClientView:
    """New class counts, which take effect with the next round, and the number of held-out images."""
    return enrolment.update_counts(ctx, identity, caller.actor, body.class_counts, body.held_out_images)


@router.delete("/v1/me", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 403, 429))
def delete_me(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> None:
    """Leave; what was uploaded still counts."""
    enrolment.leave(ctx, identity, caller.actor)


@router.post("/v1/me/token", responses=problem_responses(401, 403, 429))
def renew_token(ctx: Ctx, identity: ClientIdentity, caller: AnyCaller) -> TokenAnswer:
    """A new token; the present one stays valid until the new one is first used. Asking again replaces the new one."""
    return enrolment.renew(ctx, identity, caller.actor)
