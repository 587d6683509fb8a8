"""The page of one federation."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from server.api.access import Ctx
from server.api.limits import LimitsOf
from server.dashboard import figures
from server.dashboard.access import PageRoute, Pages, SignedIn
from server.dashboard.feed import feed
from server.service import federations, invites
from server.service.context import Context
from server.service.insights.accuracies import history
from server.service.insights.activity import recent_entries, recent_round_ends
from server.service.insights.markers import federation_marker
from server.service.insights.rounds import round_lines, round_parts
from server.service.insights.sites import RECENT_ROUNDS, site_rows
from server.service.measurements import reports
from shared.charts.sparkline import sparkline

router = APIRouter(route_class=PageRoute)
SITES_PER_PAGE = 50
_MOST_INVITES = 20
Page = Annotated[int, Query(ge=1, le=100_000)]
Number = Annotated[int | None, Query(alias="round", ge=1, lt=2**31)]


@router.get("/federations/{name}")
async def show_federation(
    request: Request,
    ctx: Ctx,
    dashboard: Pages,
    session: SignedIn,
    limits: LimitsOf,
    name: str,
    sites: Page = 1,
    number: Number = None,
) -> Response:
    """Show a federation's state, its measurements, its sites and its rounds."""
    return await limits.in_history_thread(
        lambda: dashboard.live_page(
            request,
            session,
            lambda: federation_marker(ctx, name),
            "federation.html",
            lambda: load(ctx, name, sites, number),
        )
    )


def load(ctx: Context, name: str, page: int = 1, number: int | None = None) -> dict[str, Any]:
    """Return what the page shows."""
    view = federations.show(ctx, name)
    rows, count = site_rows(ctx, name, page, SITES_PER_PAGE)
    scores, spread = history(ctx, name), reports.heterogeneity(ctx, name, None)
    lines, parts = round_lines(ctx, name), round_parts(ctx, name, number)
    open_invites = [invite for invite in invites.invites_of(ctx, name) if invite.state == "open"]
    return {
        "view": view,
        "sites": [(row, sparkline(f"Accuracy of {row.client.name}", row.accuracies)) for row in rows],
        "site_count": count,
        "page": page,
        "pages": -(-count // SITES_PER_PAGE),
        "recent_rounds": RECENT_ROUNDS,
        "accuracy": figures.accuracy_chart(scores) if scores.accuracy else None,
        "loss": figures.loss_chart(scores) if scores.loss else None,
        "last_accuracy": scores.accuracy.get(scores.numbers[-1]) if scores.numbers else None,
        "models": scores.models,
        "shown_models": len(scores.numbers),
        "verdicts": figures.verdict_chart(view.verdicts) if view.verdicts else None,
        "heatmap": figures.class_heatmap(spread) if spread.clients else None,
        "withheld": len(spread.withheld),
        "lines": lines,
        "rounds": figures.rounds_timeline(lines) if any(line.last_s is not None for line in lines) else None,
        "parts": figures.round_timeline(parts) if parts is not None and parts.parts else None,
        "feed": feed(recent_entries(ctx, name, 30), recent_round_ends(ctx, name, 12)),
        "invites": open_invites[-_MOST_INVITES:][::-1],
    }
