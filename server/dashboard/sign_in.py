"""Signing in with a token, and out."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse

from server.api.access import Ctx, address_of
from server.api.errors import problem_of
from server.core.errors import CoordinatorError
from server.dashboard.access import (
    SIGN_IN,
    PageRoute,
    Pages,
    SignedIn,
    actor_of,
    require_own_page,
    role_of_token,
    sign_in_form,
)
from server.dashboard.pages import render
from server.service.sign_ins import record_sign_in, record_sign_out

router = APIRouter(route_class=PageRoute)
_Fields = Annotated[Mapping[str, str], Depends(sign_in_form)]


@router.get(SIGN_IN)
def show_sign_in(request: Request, wanted: Annotated[str, Query(alias="next", max_length=500)] = "/") -> HTMLResponse:
    """Show the form for the token."""
    return HTMLResponse(render(request, "sign_in.html", wanted=_own_path(wanted), error=""))


@router.post(SIGN_IN)
async def sign_in(request: Request, ctx: Ctx, dashboard: Pages, fields: _Fields) -> Response:
    """Open a session for the holder of a token."""
    token, wanted = fields.get("token", "").strip(), _own_path(fields.get("next", "/"))
    try:
        async with request.app.state.throttle.attempt(address_of(request), token):
            role = role_of_token(request, token)
    except CoordinatorError as error:
        problem = problem_of(error)
        headers = {"Retry-After": problem.headers["retry-after"]} if "retry-after" in problem.headers else None
        message = f"{error.message} {error.next_step or ''}".strip()
        page = render(request, "sign_in.html", wanted=wanted, error=message)
        return HTMLResponse(page, problem.status_code, headers)
    session = dashboard.sessions.start(role)
    await run_in_threadpool(record_sign_in, ctx, actor_of(request, session))
    response = RedirectResponse(request.scope.get("root_path", "") + wanted, HTTPStatus.SEE_OTHER)
    dashboard.cookie.put(response, request, dashboard.sessions.sign(session))
    return response


@router.post("/sign-out")
def sign_out(request: Request, ctx: Ctx, dashboard: Pages, session: SignedIn) -> Response:
    """End the session, on every replica.

    The button is on pages that all sessions share, so the form has no token of its own: SameSite and the origin protect
    it, and all that a forged one could do is to sign somebody out.
    """
    require_own_page(request)
    record_sign_out(ctx, actor_of(request, session), session.id)
    response = RedirectResponse(request.scope.get("root_path", "") + SIGN_IN, HTTPStatus.SEE_OTHER)
    dashboard.cookie.remove(response, request)
    return response


def _own_path(wanted: str) -> str:
    """Return where to go after the sign-in: a path of ours, never another host."""
    is_own = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if is_own else "/"
