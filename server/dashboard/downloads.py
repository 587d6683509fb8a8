"""Files of a federation: its newest model, its measurements, its plan."""

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from server.api.access import Ctx
from server.api.limits import LimitsOf
from server.api.streaming import send_blob
from server.dashboard.access import PageRoute, SignedIn
from server.service import federations
from server.service.downloads import federation_model
from server.service.measurements.metrics_csv import metrics_csv

router = APIRouter(route_class=PageRoute, prefix="/federations/{name}")


@router.get("/model.safetensors")
def get_model(
    request: Request,
    ctx: Ctx,
    session: SignedIn,  # noqa: ARG001 - authorizes the call
    name: str,
    number: Annotated[int | None, Query(alias="round", ge=0, lt=2**31)] = None,
) -> Response:
    """Download a global model."""
    return _named(send_blob(request, ctx, federation_model(ctx, name, number)), f"{name}.safetensors")


@router.get("/metrics.csv")
async def get_metrics(
    ctx: Ctx,
    session: SignedIn,  # noqa: ARG001 - authorizes the call
    limits: LimitsOf,
    name: str,
) -> Response:
    """Download all measurements as CSV."""
    pages = (page.encode() for page in metrics_csv(ctx, name, None))
    return _named(await limits.stream(pages, "text/csv"), f"{name}.csv")


@router.get("/plan.json")
def get_plan(
    ctx: Ctx,
    session: SignedIn,  # noqa: ARG001 - authorizes the call
    name: str,
) -> Response:
    """Download the plan."""
    plan = federations.show(ctx, name).plan
    text = json.dumps(plan.model_dump(mode="json") if plan else {}, indent=2, ensure_ascii=False)
    return _named(Response(text + "\n", media_type="application/json"), f"{name}.json")


def _named(response: Response, file: str) -> Response:
    """Let the browser save the response under a name; federations' names are safe in file names."""
    response.headers["Content-Disposition"] = f'attachment; filename="{file}"'
    return response
