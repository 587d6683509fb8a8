"""Federations: what operators control and read, and what clients may read of their own."""

import re
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from pydantic_core import to_json

from server.api.access import Admin, AnyCaller, ClientIdentity, Ctx, Member, authenticate_caller
from server.api.guard import guarded, with_shortcut
from server.api.hot_models import HotModels
from server.api.limits import DOWNLOAD, HISTORY, LimitsOf
from server.api.streaming import Stored, download_options, send_blob, send_model
from server.core.errors import NotFound
from server.service import audit, client_tokens, clients, deletion, federations, invites, rollback
from server.service.downloads import federation_model, model_at_once, serving_personal
from server.service.measurements import reports
from server.service.measurements.metrics_csv import metrics_csv
from shared.contract.messages import (
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
from shared.contract.plan import FederationPlan
from shared.http.openapi import problem_responses

router = APIRouter(tags=["federations"], route_class=guarded(authenticate_caller))
_EXAMPLE = {
    "name": "lung-nodules",
    "preset": "offset-dropout",
    "classes": ["benign", "malignant"],
    "image": {"channels": 1, "height": 64, "width": 64},
    "model": {"backbone": "resnet18"},
    "rounds": {"count": 50, "min_clients": 3, "quorum": 0.66, "deadline_s": 21600},
}
_READ = problem_responses(401, 403, 404, 422, 429)
_CHANGE = problem_responses(401, 403, 404, 409, 413, 415, 422, 429)
Plan = Annotated[FederationPlan, Body(openapi_examples={"default": {"value": _EXAMPLE}})]
Confirm = Annotated[str, Query(max_length=64, description="The federation's name again, as confirmation.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of entries to return.")]


@router.post("/v1/federations", status_code=HTTPStatus.CREATED, responses=_CHANGE)
def create_federation(ctx: Ctx, caller: Admin, plan: Plan) -> FederationView:
    """Create a federation from a plan. An invalid plan is rejected with all of its errors."""
    federations.create(ctx, caller.actor, plan)
    return federations.show(ctx, plan.name)


@router.get("/v1/federations", dependencies=[HISTORY], responses=_READ, response_model=list[FederationView])
async def list_federations(ctx: Ctx, caller: AnyCaller, limits: LimitsOf) -> Response:
    """List all federations; a client sees only its own."""
    only = caller.identity.federation_id if caller.identity else None
    return await limits.in_history_thread(lambda: _json(federations.list_all(ctx, only)))


@router.get("/v1/federations/{name}", dependencies=[HISTORY], responses=_READ, response_model=FederationView)
async def get_federation(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """Return a federation's state, plan, what it is waiting for, and at which sites joining paid off.

    Clients do not see the names of other clients, nor their verdicts.
    """
    return await limits.in_history_thread(lambda: _json(federations.show(ctx, name, caller.only_client)))


@router.delete("/v1/federations/{name}", status_code=HTTPStatus.NO_CONTENT, responses=_CHANGE)
def delete_federation(ctx: Ctx, caller: Admin, name: str, confirm: Confirm) -> None:
    """Delete a federation with its models, history and clients. This cannot be undone.

    The federation must not be running or paused. It disappears at once; its storage is freed in the background.
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
    """Cancel the federation permanently. Idempotent."""
    federations.cancel(ctx, caller.actor, name)
    return federations.show(ctx, name)


@router.post("/v1/federations/{name}/rollback", responses=_CHANGE | problem_responses(410))
def roll_back_federation(ctx: Ctx, caller: Admin, name: str, request: RollbackRequest) -> FederationView:
    """Publish an older model again as the next one, and pause the federation. The history is kept."""
    rollback.roll_back(ctx, caller.actor, name, request.to)
    return federations.show(ctx, name)


@router.post("/v1/federations/{name}/invites", status_code=HTTPStatus.CREATED, responses=_CHANGE)
def create_invite(ctx: Ctx, caller: Admin, name: str, request: InviteRequest | None = None) -> InviteAnswer:
    """Create an invite, which expires and can be used once. Its token is not shown again."""
    wanted = request or InviteRequest()
    return invites.create(ctx, caller.actor, name, wanted.expires_in_s, wanted.note)


@router.get("/v1/federations/{name}/invites", responses=_READ)
def list_invites(ctx: Ctx, caller: Admin, name: str) -> list[InviteView]:  # noqa: ARG001 - authorizes the call
    """List the federation's invites, oldest first, without their tokens: which are open, and who used the others."""
    return invites.invites_of(ctx, name)


@router.delete("/v1/federations/{name}/invites/{invite}", status_code=HTTPStatus.NO_CONTENT, responses=_CHANGE)
def revoke_invite(ctx: Ctx, caller: Admin, name: str, invite: str) -> None:
    """Revoke an unused invite. Idempotent."""
    invites.revoke(ctx, caller.actor, name, invite)


@router.get("/v1/federations/{name}/clients", dependencies=[HISTORY], responses=_READ, response_model=list[ClientView])
async def list_clients(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """List the federation's clients; a client sees only itself."""
    return await limits.in_history_thread(lambda: _json(clients.clients_of(ctx, name, caller.only_client)))


@router.post("/v1/federations/{name}/clients/{client}/revoke", status_code=HTTPStatus.NO_CONTENT, responses=_CHANGE)
def revoke_client(ctx: Ctx, caller: Admin, name: str, client: str) -> None:
    """Revoke a client's access, by name or id. Rounds no longer wait for it."""
    clients.revoke(ctx, caller.actor, name, client)


@router.post("/v1/federations/{name}/clients/{client}/rotate", responses=_CHANGE)
def rotate_client_token(ctx: Ctx, caller: Admin, name: str, client: str) -> TokenAnswer:
    """Create a new token for a client. The old one stops working at once."""
    return client_tokens.rotate(ctx, caller.actor, name, client)


@router.get("/v1/federations/{name}/rounds", dependencies=[HISTORY], responses=_READ, response_model=list[RoundView])
async def list_rounds(
    ctx: Ctx,
    caller: Member,
    limits: LimitsOf,
    name: str,
    after: Annotated[int, Query(ge=0, lt=2**31, description="Return rounds with a higher number.")] = 0,
    limit: Limit = 100,
) -> Response:
    """List rounds, oldest first, with their updates and measurements; a client sees only its own."""
    pages = reports.round_pages(ctx, name, caller.only_client, after, limit)
    return await limits.stream(_json_array(pages), "application/json")


@router.get(
    "/v1/federations/{name}/metrics.csv", dependencies=[HISTORY], responses=_READ, response_class=PlainTextResponse
)
async def get_metrics_csv(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """Return measurements as CSV, one row per round and client; a client sees only its own rows."""
    pages = metrics_csv(ctx, name, caller.only_client)
    return await limits.stream((page.encode() for page in pages), "text/csv")


@router.get(
    "/v1/federations/{name}/heterogeneity", dependencies=[HISTORY], responses=_READ, response_model=HeterogeneityView
)
async def get_heterogeneity(ctx: Ctx, caller: Member, limits: LimitsOf, name: str) -> Response:
    """Return the degree of heterogeneity (DH) and each client's class distribution; a client sees only its own."""
    return await limits.in_history_thread(lambda: _json(reports.heterogeneity(ctx, name, caller.only_client)))


def _dump(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


def _json(value: object) -> Response:
    """Serialize in the history thread that read the data, not in the event loop."""
    return Response(_dump(value), media_type="application/json")


def _json_array(pages: Iterable[Sequence[object]]) -> Iterator[bytes]:
    """Yield one JSON array of all elements, page by page."""
    before = b"["
    for page in pages:
        yield before + _dump(page)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


_MODEL_OF_ROUND = re.compile(rb"round=(\d{1,9})")


async def _agents_model(request: Request) -> Response | None:
    found, caller = _MODEL_OF_ROUND.fullmatch(request.scope["query_string"]), request.state.caller
    name, state = request.path_params["name"], request.app.state
    if found is None or caller.identity is None or caller.identity.federation != name:
        return None
    blob = model_at_once(state.ctx, name, int(found[1]))
    data = await state.hot_models.get(blob[0], blob[1]) if blob is not None and request.method == "GET" else None
    if blob is None or data is None:
        return None
    return send_model(request, state.ctx, Stored(*blob), data, state.limits.downloads.hold(caller))


@router.head("/v1/federations/{name}/model", dependencies=[DOWNLOAD], **download_options(410))
@router.get("/v1/federations/{name}/model", dependencies=[DOWNLOAD], **download_options(410))
@with_shortcut(_agents_model)
async def get_model(
    request: Request,
    ctx: Ctx,
    caller: Member,  # noqa: ARG001 - authorizes the call
    name: str,
    number: Annotated[
        int | None,
        Query(alias="round", ge=0, lt=2**31, description="The model's number (0 = initial). Default: the newest."),
    ] = None,
) -> Response:
    """Download a global model: one safetensors file with plain tensor names and the plan in its metadata."""
    blob = await run_in_threadpool(federation_model, ctx, name, number)
    hot: HotModels = request.app.state.hot_models
    data = await hot.get(blob.id, blob.size_bytes) if request.method == "GET" else None
    return send_model(request, ctx, Stored(blob.id, blob.size_bytes, blob.digest or ""), data)


@router.head("/v1/federations/{name}/personal", dependencies=[DOWNLOAD], **download_options(410))
@router.get("/v1/federations/{name}/personal", dependencies=[DOWNLOAD], **download_options(410))
async def get_personal(
    request: Request,
    ctx: Ctx,
    identity: ClientIdentity,
    limits: LimitsOf,
    name: str,
    number: Annotated[int, Query(alias="model", ge=0, lt=2**31, description="The number of the newest model.")],
) -> Response:
    """Download this client's personal tensors for serving the newest model."""
    if identity.federation != name:
        raise NotFound("no-such-federation", f"There is no federation {name!r}.")
    blob = await limits.in_personal_thread(serving_personal, ctx, identity, name, number)
    return await run_in_threadpool(send_blob, request, ctx, blob)


@router.get("/v1/audit", responses=_READ, tags=["operations"])
def list_audit(
    ctx: Ctx,
    caller: Admin,  # noqa: ARG001 - authorizes the call
    federation: Annotated[str | None, Query(description="Return this federation's entries only.")] = None,
    after: Annotated[int, Query(ge=0, lt=2**31, description="Return entries with a higher id.")] = 0,
    limit: Limit = 100,
) -> list[AuditView]:
    """List audit log entries, oldest first."""
    return audit.entries(ctx, federation=federation, after_id=after, limit=limit)
