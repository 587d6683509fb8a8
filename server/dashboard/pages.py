"""Renders pages, and answers questions whether they have changed without rendering them again."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse

from server.api.errors import problem_of
from server.service.context import Context
from server.service.settings import Settings
from server.service.sign_ins import EndedSessions
from shared import __version__
from shared.contract.errors import DistransError
from shared.http.request_id import current_request_id
from shared.http.sessions import LIFETIME_S, Session, SessionCookie, Sessions
from shared.pages.environment import environment

ADMIN, VIEWER = "admin", "viewer"  # the roles of sessions; a viewer may look but not act
LIVE_S = 2.0  # how often an open page asks whether it has changed
_REST_FACTOR = 150  # a page rests for this many times what it cost: open pages take less than 1 % of a core
_MAX_REST_S = 30.0
_MAX_PAGES = 64  # kept in memory, of at most half a megabyte each
_templates = environment(Path(__file__).parent / "templates")


@dataclass(frozen=True)
class _Rendered:
    etag: str
    html: str
    rests_until: float


class Dashboard:
    """What the pages of one process share."""

    def __init__(self, ctx: Context, settings: Settings) -> None:
        tokens = {ADMIN: settings.admin_token, VIEWER: settings.viewer_token}
        secrets = {role: token.encode() for role, token in tokens.items() if token}
        ended = EndedSessions(ctx, LIFETIME_S)
        self.sessions = Sessions(secrets, lambda session: ended.holds(session.id), ctx.clock)
        self.cookie = SessionCookie("distrans", per_port=False)
        self._rendered: OrderedDict[tuple[str, ...], _Rendered] = OrderedDict()
        self._lock = threading.Lock()

    def live_page(
        self, request: Request, session: Session, marker: Callable[[], str], template: str, load: Callable[[], Any]
    ) -> Response:
        """Return a page that all sessions of a role share, or 304 if the caller has it already.

        `marker` tells cheaply whether the page has changed, `load` returns the template's variables.
        """
        key = (session.role, request.scope.get("root_path", ""), request.url.path, request.url.query)
        known = request.headers.get("if-none-match")
        kept = self._rendered.get(key)
        if kept is not None and known == kept.etag and time.monotonic() < kept.rests_until:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": kept.etag})
        etag = _etag(__version__, *key, marker())
        if kept is None or kept.etag != etag:
            began = time.perf_counter()
            html = render(request, template, session=session, live_s=LIVE_S, **load())
            rest_s = min(_MAX_REST_S, _REST_FACTOR * (time.perf_counter() - began))
            kept = _Rendered(etag, html, time.monotonic() + rest_s)
            with self._lock:
                self._rendered[key] = kept
                self._rendered.move_to_end(key)
                if len(self._rendered) > _MAX_PAGES:
                    self._rendered.popitem(last=False)
        if known == etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": etag})
        return HTMLResponse(kept.html, headers={"ETag": etag})

    def form_page(
        self, request: Request, session: Session, template: str, status: int = HTTPStatus.OK, **values: Any
    ) -> Response:
        """Return a page with a form, which only this session may send."""
        values["csrf"] = self.sessions.csrf(session)
        return HTMLResponse(render(request, template, session=session, **values), status)


def render(request: Request, template: str, **values: Any) -> str:
    """Return a page as HTML."""
    defaults = {
        "base": request.scope.get("root_path", ""),
        "program": "coordinator",
        "live_s": 0,
        "now": request.app.state.ctx.clock(),
        "session": None,
        "path": request.url.path.removeprefix(request.scope.get("root_path", "")),
    }
    return _templates.get_template(template).render(defaults | values)


def error_page(request: Request, error: DistransError) -> Response:
    """Return the page for an error of a use case."""
    problem = problem_of(error)
    values = {"error": error, "request_id": current_request_id(), "session": getattr(request.state, "session", None)}
    answer = HTMLResponse(render(request, "error.html", **values), problem.status_code)
    if "retry-after" in problem.headers:
        answer.headers["Retry-After"] = problem.headers["retry-after"]
    return answer


def _etag(*parts: str) -> str:
    return f'"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"'
