"""The audit log, newest first, with filters."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse

from server.api.access import Ctx
from server.dashboard.access import PageRoute, SignedIn
from server.dashboard.pages import render
from server.service.insights.activity import AuditFilter, audit_page, federation_names

router = APIRouter(route_class=PageRoute)
_PER_PAGE = 100
Text = Annotated[str, Query(max_length=128)]


@router.get("/audit")
def show_audit(
    request: Request,
    ctx: Ctx,
    session: SignedIn,
    federation: Text = "",
    actor: Text = "",
    action: Text = "",
    before: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> Response:
    """Show the audit log."""
    wanted = AuditFilter(federation.strip(), actor.strip(), action.strip(), before)
    entries = audit_page(ctx, wanted, _PER_PAGE)
    filters = {"federation": wanted.federation, "actor": wanted.actor, "action": wanted.action}
    older = urlencode({**filters, "before": entries[-1].id}) if len(entries) == _PER_PAGE else ""
    names = federation_names(ctx)
    if wanted.federation and wanted.federation not in names:
        names.insert(0, wanted.federation)  # deleted, or too old to be listed: its entries stay
    values = {"entries": entries, "wanted": wanted, "older": older, "federations": names, "session": session}
    return HTMLResponse(render(request, "audit.html", **values))
