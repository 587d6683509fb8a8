"""Tokens of the form `kind_id_secret`. The secret is random, shown once, and stored only as a hash."""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal

Kind = Literal["client", "invite"]
_PREFIX: dict[Kind, str] = {"client": "dtc", "invite": "dti"}


@dataclass(frozen=True)
class NewToken:
    """A newly created token: text for its holder, hash for the database."""

    text: str
    hash: str


def new_token(kind: Kind, owner_id: str) -> NewToken:
    """Create a token for the row with this id."""
    secret = secrets.token_urlsafe(32)
    return NewToken(f"{_PREFIX[kind]}_{owner_id}_{secret}", hash_secret(secret))


def new_admin_token() -> str:
    """Create a random admin token."""
    return "dta_" + secrets.token_urlsafe(32)


def split_token(kind: Kind, text: str) -> tuple[str, str] | None:
    """Return (owner id, secret) of a token of this kind, or None for anything else."""
    prefix, _, rest = text.partition("_")
    owner_id, separator, secret = rest.partition("_")
    if prefix != _PREFIX[kind] or not separator or not owner_id.isalnum() or len(owner_id) > 32:
        return None
    return owner_id, secret


def hash_secret(secret: str) -> str:
    """Hash a secret. A fast hash is enough: secrets have 256 random bits and cannot be guessed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, stored_hash: str) -> bool:
    """Compare a secret with a stored hash in constant time."""
    return hmac.compare_digest(hash_secret(secret), stored_hash)
