"""The first page: every federation as a card."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from server.api.access import Ctx
from server.api.limits import LimitsOf
from server.dashboard.access import PageRoute, Pages, SignedIn
from server.service import federations
from server.service.context import Context
from server.service.insights.markers import coordinator_marker
from server.service.monitoring import status
from shared.contract.messages import FederationView

router = APIRouter(route_class=PageRoute)
_MOST_CARDS = 60
_ORDER = ("running", "paused", "created", "finished", "cancelled")


@router.get("/")
async def show_overview(
    request: Request, ctx: Ctx, dashboard: Pages, session: SignedIn, limits: LimitsOf, everything: bool = False
) -> Response:
    """List the federations, those that run first."""
    return await limits.in_history_thread(
        lambda: dashboard.live_page(
            request, session, lambda: coordinator_marker(ctx), "overview.html", lambda: _load(ctx, everything)
        )
    )


def _load(ctx: Context, everything: bool) -> dict[str, Any]:
    views = sorted(federations.list_all(ctx), key=lambda view: (_ORDER.index(view.state), view.name))
    most = len(views) if everything else _MOST_CARDS
    return {"federations": views[:most], "left_out": len(views[most:]), "totals": _totals(ctx, views)}


def _totals(ctx: Context, views: Sequence[FederationView]) -> dict[str, Any]:
    found = status(ctx)
    return {
        "running": sum(view.state == "running" for view in views),
        "federations": len(views),
        "sites": sum(one.clients.get("active", 0) for one in found.federations),
        "bytes": found.blob_bytes,
    }
