"""Who is looking, and whether a form really comes from one of our pages."""

import hmac
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from fastapi import Depends, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from typing_extensions import override

from server.api.access import address_of, is_admin_token
from server.core.errors import InvalidInput, NotAllowed, NotAuthenticated, TooLarge
from server.dashboard.pages import ADMIN, VIEWER, Dashboard, error_page
from server.service.context import Actor
from server.service.settings import Settings
from shared.contract.errors import DistransError
from shared.http.forms import BadForm, FormTooLarge, read_form
from shared.http.sessions import Session

MAX_FORM_BYTES = 1024 * 1024
_MAX_SIGN_IN_BYTES = 4096
SIGN_IN = "/sign-in"


class SignInNeeded(NotAuthenticated):
    """Nobody has signed in, or the session has ended."""

    def __init__(self) -> None:
        super().__init__("sign-in", "You have not signed in, or your session has ended.", next_step="Sign in.")


class PageRoute(APIRoute):
    """A route whose errors are pages, and which leads to the sign-in if nobody has signed in."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def shown(request: Request) -> Response:
            try:
                response = await handle(request)
            except SignInNeeded:
                response = _to_sign_in(request)
            except DistransError as error:
                response = error_page(request, error)
            # Without it, forms would come with `Origin: null`, see `_require_own_page`.
            response.headers.setdefault("Referrer-Policy", "same-origin")
            return response

        return shown


def _to_sign_in(request: Request) -> Response:
    base = request.scope.get("root_path", "")
    path = request.url.path.removeprefix(base)
    wanted = path + (f"?{request.url.query}" if request.url.query else "") if request.method == "GET" else "/"
    query = "" if wanted == "/" else f"?next={quote(wanted, safe='')}"
    return RedirectResponse(f"{base}{SIGN_IN}{query}", 303)


def dashboard_of(request: Request) -> Dashboard:
    """Return the dashboard of this process."""
    return request.app.state.dashboard  # type: ignore[no-any-return]


Pages = Annotated[Dashboard, Depends(dashboard_of)]


def signed_in(request: Request, dashboard: Pages) -> Session:
    """Return the session of the request; raise SignInNeeded if there is none."""
    session = dashboard.sessions.find(dashboard.cookie.read(request))
    if session is None:
        raise SignInNeeded
    if session.role == ADMIN:
        settings: Settings = request.app.state.settings
        is_admin_token(settings.admin_token, address_of(request), settings)  # raises outside the admin networks
    request.state.session = session
    return session


SignedIn = Annotated[Session, Depends(signed_in)]


def acting(session: SignedIn) -> Session:
    """Return the session; raise NotAllowed for viewers."""
    if session.role != ADMIN:
        raise NotAllowed(
            "viewer-only",
            "You have signed in with the viewer token, which may look but not act.",
            next_step="Sign out, then sign in with the admin token.",
        )
    return session


Acting = Annotated[Session, Depends(acting)]


async def sent_form(request: Request, session: Acting, dashboard: Pages) -> Mapping[str, str]:
    """Return the fields of a form that was sent from one of this session's pages."""
    require_own_page(request)
    fields = await read_fields(request, MAX_FORM_BYTES)
    if not dashboard.sessions.is_from_form(session, fields.get("csrf", "")):
        raise NotAllowed("stale-form", "This form belongs to another session.", next_step="Load the page again.")
    return fields


Form = Annotated[Mapping[str, str], Depends(sent_form)]


async def sign_in_form(request: Request) -> Mapping[str, str]:
    """Return the fields of the sign-in, which has no session yet."""
    require_own_page(request)
    return await read_fields(request, _MAX_SIGN_IN_BYTES)


def require_own_page(request: Request) -> None:
    """Raise NotAllowed for a form that another site's page has sent.

    Browsers say where a request comes from in Sec-Fetch-Site, but only over HTTPS and to this machine; else in Origin.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin", "")
    is_own = site == "same-origin" if site else urlsplit(origin).netloc == request.headers.get("host", "-")
    if not is_own:
        raise NotAllowed(
            "cross-site",
            f"This form was not sent from a page of this coordinator, but from {origin or 'an unknown one'}.",
            next_step="Open the dashboard and try again; behind a proxy, it must pass on the Host header.",
        )


async def read_fields(request: Request, max_bytes: int) -> dict[str, str]:
    """Return the fields of a form; the last one of a name counts."""
    settings: Settings = request.app.state.settings
    try:
        return await read_form(request, max_bytes, settings.json_body_s)
    except FormTooLarge as error:
        raise TooLarge("too-large", f"The form is too large. {error}") from error
    except BadForm as error:
        raise InvalidInput("not-a-form", f"The body is not a form. {error}") from error


def role_of_token(request: Request, token: str) -> str:
    """Return whose token this is; raise NotAuthenticated if it is neither the admin's nor the viewer's."""
    settings: Settings = request.app.state.settings
    if is_admin_token(token, address_of(request), settings):
        return ADMIN
    if settings.viewer_token is not None and hmac.compare_digest(token.encode(), settings.viewer_token.encode()):
        return VIEWER
    raise NotAuthenticated(
        "invalid-token",
        "This is not a token of this coordinator.",
        next_step="Paste the admin token, which `distrans-server serve` wrote to the file admin-token in its data "
        "folder, or the viewer token.",
    )


def actor_of(request: Request, session: Session) -> Actor:
    """Return who acts, for the audit log."""
    return Actor(f"{session.role}:dashboard", address_of(request))
