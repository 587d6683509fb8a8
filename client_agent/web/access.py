"""Who may call the web service: everyone, or callers with the predict token; people sign in with it."""

import hmac
import logging
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.responses import Response

from client_agent.settings import ServeOptions
from client_agent.web.problems import ProblemError
from shared.http.addresses import address_key
from shared.http.client_connection import is_loopback
from shared.http.rate_limiter import RateLimiter
from shared.http.sessions import Session, SessionCookie, Sessions, SignedOutHere

logger = logging.getLogger(__name__)
_ROLE = "site"
_FREE_FAILURES, _FAILURES_PER_S = 10, 0.5


class Access:
    """The token, the sessions of people who signed in with it, and how often somebody may guess."""

    def __init__(self, options: ServeOptions) -> None:
        self._token = options.token
        # Random for each run: who signed out stays signed out although that is kept in memory only.
        self._signed_out = SignedOutHere()
        secret = (options.token or "").encode() + secrets.token_bytes(32)
        self._sessions = Sessions({_ROLE: secret}, self._signed_out.has)
        self._cookie = SessionCookie("distrans-agent", per_port=True)
        self._everyone = Session(_ROLE, "0" * 32, 0)  # of an agent without a token
        self._failures = RateLimiter(_FAILURES_PER_S, _FREE_FAILURES)
        self.may_pin = options.token is not None or is_loopback(options.host)

    @property
    def needs_sign_in(self) -> bool:
        """Whether people must sign in."""
        return self._token is not None

    def session(self, request: Request) -> Session | None:
        """Return the caller's session; everyone has one if there is no token."""
        return self._sessions.find(self._cookie.read(request)) if self.needs_sign_in else self._everyone

    def may_see(self, request: Request) -> bool:
        """Return whether the caller has a session or sends the token."""
        return self.session(request) is not None or self._is_token(_bearer_token(request))

    def csrf(self, session: Session) -> str:
        """Return what the session's forms must repeat."""
        return self._sessions.csrf(session)

    def is_from_form(self, session: Session, csrf: str) -> bool:
        """Return whether a form was made for this session."""
        return self._sessions.is_from_form(session, csrf)

    def wait_s(self, request: Request) -> int:
        """Return the seconds until this address may try another token; 0 means now."""
        return self._failures.wait_s(_address(request))

    def sign_in(self, request: Request, token: str, response: Response) -> bool:
        """Start a session if the token is right; otherwise count a failure."""
        if not self._is_token(token):
            self._failures.spend(_address(request))
            logger.warning("somebody at %s tried to sign in with a wrong token", _address(request))
            return False
        self._cookie.put(response, request, self._sessions.sign(self._sessions.start(_ROLE)))
        return True

    def sign_out(self, request: Request, response: Response) -> None:
        """End the caller's session."""
        session = self.session(request)
        if session is not None and self.needs_sign_in:
            self._signed_out.add(session)
        self._cookie.remove(response, request)

    def token_check(self, is_exempt: Callable[[Request], bool] = lambda _request: False) -> Callable[..., Any]:
        """Return a dependency that rejects callers without the token; without a token, everyone may call."""
        bearer = HTTPBearer(auto_error=False, description="Required if the agent runs with a predict token.")

        # `async`, so that it runs in place: FastAPI runs plain functions in another thread.
        async def check(
            request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
        ) -> None:
            if not is_exempt(request):
                self._require_token(credentials.credentials if credentials else "")

        return check

    def check_header(self, request: Request) -> None:
        """Reject a caller without the token; without a token, everyone may call."""
        self._require_token(_bearer_token(request))

    def _require_token(self, given: str) -> None:
        if not self._is_token(given):
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                "invalid-token",
                "This agent requires a token.",
                "Send it as Authorization: Bearer TOKEN.",
                {"WWW-Authenticate": "Bearer"},
            )

    def _is_token(self, given: str) -> bool:
        return self._token is None or hmac.compare_digest(given.encode(), self._token.encode())


def _bearer_token(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _address(request: Request) -> str:
    return address_key(request.client.host if request.client else "")
