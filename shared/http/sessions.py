"""Sessions of people who signed in with a token, and the cookie that carries them.

A session is a signed text; nothing is stored but who signed out. Its key is derived from the token, so a session ends
when the token changes, in every process that knows the new one.

The cookie is HttpOnly and SameSite=Strict, and Secure where the browser uses HTTPS. Forms repeat the session's `csrf`,
which other sites cannot read.
"""

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.responses import Response

LIFETIME_S = 12 * 3600
_MAX_SIGNED_OUT = 10_000
_CLOCK_TOLERANCE_S = 60
_SESSION = re.compile(r"([a-z]{1,20})\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True)
class Session:
    """Who signed in: the role that the token gave, a random id, and when the session ends (seconds since 1970)."""

    role: str
    id: str
    ends_at: int


class SignedOutHere:
    """Sessions that were signed out at this process. If there are too many to remember, all older sessions end."""

    def __init__(self, most: int = _MAX_SIGNED_OUT, clock: Callable[[], float] = time.time) -> None:
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._ids: dict[str, int] = {}
        self._before = 0  # sessions that would have ended by then have ended

    def add(self, session: Session) -> None:
        """Note that a session has ended."""
        with self._lock:
            now = self._clock()
            self._ids = {name: ends_at for name, ends_at in self._ids.items() if ends_at > now}
            self._ids[session.id] = session.ends_at
            if len(self._ids) > self._most:
                self._before = max(self._ids.values())
                self._ids.clear()

    def has(self, session: Session) -> bool:
        """Return whether it has."""
        return session.ends_at <= self._before or session.id in self._ids


class Sessions:
    """Starts and recognizes sessions. Thread-safe."""

    def __init__(
        self,
        secret_of: Mapping[str, bytes],
        is_signed_out: Callable[[Session], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`secret_of` has each role's token, or what is derived from it; roles are lowercase words.

        `is_signed_out` returns whether a session ended before its time. Processes that share sessions must agree on it.
        """
        self._keys = {role: hmac.digest(secret, b"distrans session", "sha256") for role, secret in secret_of.items()}
        self._is_signed_out = is_signed_out
        self._clock = clock

    def start(self, role: str) -> Session:
        """Return a new session."""
        return Session(role, secrets.token_hex(16), int(self._clock()) + LIFETIME_S)

    def sign(self, session: Session) -> str:
        """Return the cookie's value."""
        return f"{_described(session)}.{self._mac(session, 'session')}"

    def find(self, value: str | None) -> Session | None:
        """Return the session of a cookie's value; None if it is forged, over, signed out, or of another token."""
        match = _SESSION.fullmatch(value or "")
        if match is None or match[1] not in self._keys:
            return None
        session = Session(match[1], match[3], int(match[2]))
        if not hmac.compare_digest(self._mac(session, "session"), match[4]):
            return None
        left_s = session.ends_at - self._clock()
        is_timely = 0 < left_s <= LIFETIME_S + _CLOCK_TOLERANCE_S  # the clock may have been wrong when it began
        return session if is_timely and not self._is_signed_out(session) else None

    def csrf(self, session: Session) -> str:
        """Return what this session's forms must repeat."""
        return self._mac(session, "form")

    def is_from_form(self, session: Session, csrf: str) -> bool:
        """Return whether a form was made for this session."""
        return hmac.compare_digest(self.csrf(session).encode(), csrf.encode(errors="replace"))

    def _mac(self, session: Session, purpose: str) -> str:
        body = f"{purpose}.{_described(session)}".encode()
        return hmac.new(self._keys[session.role], body, hashlib.sha256).hexdigest()


def _described(session: Session) -> str:
    return f"{session.role}.{session.ends_at}.{session.id}"


class SessionCookie:
    """The cookie of one program.

    With `per_port`, its name has the port, because browsers share cookies between all ports of a host. Replicas behind
    one address must not use that.
    """

    def __init__(self, program: str, *, per_port: bool) -> None:
        self._program, self._per_port = program, per_port

    def read(self, request: HTTPConnection) -> str | None:
        """Return the cookie's value."""
        plain = self._name(request)
        return request.cookies.get(f"__Host-{plain}") or request.cookies.get(plain)

    def put(self, response: Response, request: HTTPConnection, value: str) -> None:
        """Set the cookie; on HTTPS under a name that no plain connection can set."""
        is_secure = _is_secure(request)
        name = f"__Host-{self._name(request)}" if is_secure else self._name(request)
        response.set_cookie(name, value, max_age=LIFETIME_S, secure=is_secure, httponly=True, samesite="strict")

    def remove(self, response: Response, request: HTTPConnection) -> None:
        """Delete the cookie."""
        plain = self._name(request)
        for name in (plain, f"__Host-{plain}"):
            if name in request.cookies:
                is_secure = name.startswith("__Host-")
                response.delete_cookie(name, secure=is_secure, httponly=True, samesite="strict")

    def _name(self, request: HTTPConnection) -> str:
        if not self._per_port:
            return self._program
        server = request.scope.get("server")
        return f"{self._program}-{server[1] if server and server[1] else 0}"


def _is_secure(request: HTTPConnection) -> bool:
    # Behind a proxy that terminates TLS, only the browser knows; it names its origin with every form it sends.
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")
