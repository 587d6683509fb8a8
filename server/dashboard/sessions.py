"""Signed cookies that say who has signed in.

The key is derived from the token somebody signed in with: a new token ends all sessions of the old one. Signing out
ends a session everywhere, see `server.service.sign_ins`.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal

from server.service.settings import Settings

LIFETIME_S = 12 * 3600.0
COOKIE = "distrans_session"
Role = Literal["admin", "viewer"]
_MAX_COOKIE = 200  # characters


@dataclass(frozen=True)
class Session:
    """Somebody who has signed in: the admin, or a viewer who may look but not act."""

    role: Role
    id: str
    expires_at: float

    @property
    def may_act(self) -> bool:
        """Whether this session may change anything."""
        return self.role == "admin"


class Sessions:
    """Creates and checks the cookies of one coordinator."""

    def __init__(self, settings: Settings) -> None:
        tokens: dict[Role, str | None] = {"admin": settings.admin_token, "viewer": settings.viewer_token}
        self._keys = {role: _derive(token.encode(), "session") for role, token in tokens.items() if token}

    def open(self, role: Role, now: float) -> tuple[Session, str]:
        """Return a new session and its cookie."""
        session = Session(role, secrets.token_urlsafe(18), now + LIFETIME_S)
        return session, f"{role}.{session.id}.{session.expires_at:.0f}.{self._sign(session)}"

    def read(self, cookie: str, now: float) -> Session | None:
        """Return the session of a cookie; None if it is not ours, or has expired."""
        parts = cookie.split(".")
        if len(cookie) > _MAX_COOKIE or len(parts) != 4 or not parts[2].isdecimal() or not parts[2].isascii():
            return None
        role = next((role for role in self._keys if role == parts[0]), None)
        if role is None:
            return None
        session = Session(role, parts[1], float(parts[2]))
        if not hmac.compare_digest(self._sign(session).encode(), parts[3].encode()):
            return None
        return session if now < session.expires_at <= now + LIFETIME_S + 60 else None

    def form_token(self, session: Session) -> str:
        """Return what a form of this session must contain, so that no other site can send it."""
        return _derive(self._keys[session.role], f"form.{session.id}").hex()

    def is_form_token(self, session: Session, text: str) -> bool:
        """Return whether a form was made for this session."""
        return hmac.compare_digest(self.form_token(session).encode(), text.encode())

    def _sign(self, session: Session) -> str:
        text = f"{session.role}.{session.id}.{session.expires_at:.0f}"
        return _derive(self._keys[session.role], f"cookie.{text}").hex()


def _derive(key: bytes, purpose: str) -> bytes:
    return hmac.new(key, f"distrans dashboard {purpose}".encode(), hashlib.sha256).digest()
