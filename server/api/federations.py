"""What operators call, and the history that clients may read of their own federation."""

from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from pydantic_core import to_json

from server.api.access import Admin, AnyCaller, ClientIdentity, Ctx, Member, authenticate_caller
from server.api.guard import guarded
from server.api.limits import DOWNLOAD, HISTORY, LimitsOf
from server.api.streaming import downloads, send_blob
from server.core.errors import NotFound
from server.service import audit, deletion, enrolment, federations, invites, models, reports, tasks
from shared.http.openapi import problem_responses
from shared.plan import FederationPlan
from shared.schemas import (
    AuditView,
    ClientView,
    FederationView,
    HeterogeneityView,
    InviteAnswer,
    InviteRequest,
    InviteView,
    RollbackRequest,
    RoundView,
    StateRequest,
    TokenAnswer,
)

router = APIRouter(tags=["federations"], route_class=guarded(authenticate_caller))
_EXAMPLE = {
    "name": "lung-nodules",
    "preset": "learned-offset",
    "classes": ["benign", "malignant"],
    "image": {"channels": 1, "height": 64, "width": 64},
    "model": {"backbone": "resnet18"},
    "rounds": {"count": 50, "min_clients": 3, "quorum": 0.66, "deadline_s": 21600},
}
_READ = problem_responses(401, 403, 404, 422, 429)
_CHANGE = problem_responses(401, 403, 404, 409, 413, 415, 422, 429)
Plan = Annotated[FederationPlan, Body(openapi_examples={"learned offset": {"value": _EXAMPLE}})]
Confirm = Annotated[str, Query(max_length=64, description="The federation's name once more.")]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.post("/v1/federations", status_code=HTTPStatus.CREATED, responses=_CHANGE)
def create_federation(ctx: Ctx, caller: Admin, plan: Plan) -> FederationView:
    """Create a federation from its plan; every fault of a wrong plan is named at once."""
    federations.create(ctx, caller.actor, plan)
    return federations.show(ctx, plan.name)


@router.get("/v1/federations", dependencies=[HISTORY], responses=_READ, response_model=list[FederationView])
async def list_federations(ctx: Ctx, caller: AnyCaller, limits: LimitsOf) -> Response:
    """All federations; a client sees its own."""
    only = caller.identity.federation_id if caller.identity else None
    return await limits.in_history_thread(lambda: _json(federations.list_all(ctx, only)))


@router.get("/v1/federations/{name}", dependencies=[HISTORY], responses=_READ, response_model=FederationView)
async def get_federation(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """A federation: its state, what it waits for, its plan; a client is told how many others there are, not who."""
    operator = caller.identity is None
    return await limits.in_history_thread(lambda: _json(federations.show(ctx, name, for_operator=operator)))


@router.delete("/v1/federations/{name}", status_code=HTTPStatus.NO_CONTENT, responses=_CHANGE)
def delete_federation(ctx: Ctx, caller: Admin, name: str, confirm: Confirm) -> None:
    """Delete a federation that is not running or paused, with its models, history and clients. There is no way back.

    It is gone at once; its storage is freed in the background.
    """
    deletion.delete_federation(ctx, caller.actor, name, confirm)


@router.post("/v1/federations/{name}/start", responses=_CHANGE)
def start_federation(ctx: Ctx, caller: Admin, name: str) -> FederationView:
    """Start the federation. Idempotent."""
    federations.start(ctx, caller.actor, name)
    return federations.show(ctx, name)


@router.post("/v1/federations/{name}/pause", responses=_CHANGE)
def pause_federation(ctx: Ctx, caller: Admin, name: str, request: StateRequest | None = None) -> FederationView:
    """Pause the federation. Idempotent."""
    reason = request.reason if request and request.reason else "paused by the operator"
    federations.pause(ctx, caller.actor, name, reason)
    return federations.show(ctx, name)


@router.post("/v1/federations/{name}/resume", responses=_CHANGE)
def resume_federation(ctx: Ctx, caller: Admin, name: str) -> FederationView:
    """Resume the federation. Idempotent."""
    federations.resume(ctx, caller.actor, name)
    return federations.show(ctx, name)


@router.post("/v1/federations/{name}/cancel", responses=_CHANGE)
def cancel_federation(ctx: Ctx, caller: Admin, name: str) -> FederationView:
    """Cancel the federation for good. Idempotent."""
    federations.cancel(ctx, caller.actor, name)
    return federations.show(ctx, name)


@router.post("/v1/federations/{name}/rollback", responses=_CHANGE | problem_responses(410))
def roll_back_federation(ctx: Ctx, caller: Admin, name: str, request: RollbackRequest) -> FederationView:
    """Publish an older model again under the next number, and pause; nothing is removed from the history."""
    models.roll_back(ctx, caller.actor, name, request.to)
    return federations.show(ctx, name)


@router.post("/v1/federations/{name}/invites", status_code=HTTPStatus.CREATED, responses=_CHANGE)
def create_invite(ctx: Ctx, caller: Admin, name: str, request: InviteRequest | None = None) -> InviteAnswer:
    """A one-use, expiring invite; its token is shown this once."""
    wanted = request or InviteRequest()
    return enrolment.invite(ctx, caller.actor, name, wanted.expires_in_s, wanted.note)


@router.get("/v1/federations/{name}/invites", responses=_READ)
def list_invites(ctx: Ctx, caller: Admin, name: str) -> list[InviteView]:  # noqa: ARG001 - checked
    """The invites, oldest first, without their tokens: which are open, and who has used the others."""
    return invites.invites_of(ctx, name)


@router.delete("/v1/federations/{name}/invites/{invite}", status_code=HTTPStatus.NO_CONTENT, responses=_CHANGE)
def revoke_invite(ctx: Ctx, caller: Admin, name: str, invite: str) -> None:
    """Revoke an invite that was not used. Idempotent."""
    invites.revoke(ctx, caller.actor, name, invite)


@router.get("/v1/federations/{name}/clients", dependencies=[HISTORY], responses=_READ, response_model=list[ClientView])
async def list_clients(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """The clients; a client sees itself."""
    return await limits.in_history_thread(lambda: _json(enrolment.clients_of(ctx, name, caller.only_client)))


@router.post("/v1/federations/{name}/clients/{client}/revoke", status_code=HTTPStatus.NO_CONTENT, responses=_CHANGE)
def revoke_client(ctx: Ctx, caller: Admin, name: str, client: str) -> None:
    """End a client's access, by its name or id; rounds no longer wait for it."""
    enrolment.revoke(ctx, caller.actor, name, client)


@router.post("/v1/federations/{name}/clients/{client}/rotate", responses=_CHANGE)
def rotate_client_token(ctx: Ctx, caller: Admin, name: str, client: str) -> TokenAnswer:
    """A new token for a client; the old one ends at once."""
    return enrolment.rotate(ctx, caller.actor, name, client)


@router.get("/v1/federations/{name}/rounds", dependencies=[HISTORY], responses=_READ, response_model=list[RoundView])
async def list_rounds(
    ctx: Ctx,
    caller: Member,
    limits: LimitsOf,
    name: str,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Limit = 100,
) -> Response:
    """The rounds after a number, oldest first; a client sees its own updates and measurements in them."""
    pages = reports.round_pages(ctx, name, caller.only_client, after, limit)
    return await limits.stream(_json_array(pages), "application/json")


@router.get(
    "/v1/federations/{name}/metrics.csv", dependencies=[HISTORY], responses=_READ, response_class=PlainTextResponse
)
async def get_metrics_csv(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """One row per round and client, as CSV; a client sees its own rows."""
    pages = reports.metrics_csv(ctx, name, caller.only_client)
    return await limits.stream((page.encode() for page in pages), "text/csv")


@router.get(
    "/v1/federations/{name}/heterogeneity", dependencies=[HISTORY], responses=_READ, response_model=HeterogeneityView
)
async def get_heterogeneity(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """DH, and how the classes lie over the clients; a client sees its own row."""
    return await limits.in_history_thread(lambda: _json(reports.heterogeneity(ctx, name, caller.only_client)))


def _dump(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


def _json(value: object) -> Response:
    """Serialised where it was read, in a history thread, not in the event loop."""
    return Response(_dump(value), media_type="application/json")


def _json_array(pages: Iterable[Sequence[object]]) -> Iterator[bytes]:
    """One array of all elements, a page at a time."""
    before = b"["
    for page in pages:
        yield before + _dump(page)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


@router.head("/v1/federations/{name}/model", dependencies=[DOWNLOAD], **downloads(410))
@router.get("/v1/federations/{name}/model", dependencies=[DOWNLOAD], **downloads(410))
def get_model(
    request: Request,
    ctx: Ctx,
    caller: Member,  # noqa: ARG001 - checked
    name: str,
    number: Annotated[int | None, Query(alias="round", ge=0, lt=2**31, description="0 is the start.")] = None,
) -> Response:
    """A global model as safetensors, with its plan in the metadata; the newest without `round`."""
    return send_blob(request, ctx, tasks.federation_model(ctx, name, number))


@router.head("/v1/federations/{name}/personal", dependencies=[DOWNLOAD], **downloads(410))
@router.get("/v1/federations/{name}/personal", dependencies=[DOWNLOAD], **downloads(410))
async def get_personal(
    request: Request,
    ctx: Ctx,
    identity: ClientIdentity,
    limits: LimitsOf,
    name: str,
    number: Annotated[int, Query(alias="model", ge=0, lt=2**31)],
) -> Response:
    """This client's own tensors to serve the newest model with."""
    if identity.federation != name:
        raise NotFound("no-such-federation", f"There is no federation {name!r}.")
    blob = await limits.in_personal_thread(tasks.serving_personal, ctx, identity, name, number)
    return await run_in_threadpool(send_blob, request, ctx, blob)


@router.get("/v1/audit", responses=_READ, tags=["operations"])
def list_audit(
    ctx: Ctx,
    caller: Admin,  # noqa: ARG001 - checked
    federation: str | None = None,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Limit = 100,
) -> list[AuditView]:
    """The audit log after an entry, oldest first."""
    return audit.entries(ctx, federation=federation, after_id=after, limit=limit)
