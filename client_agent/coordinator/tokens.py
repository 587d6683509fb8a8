"""A site's token: replaced or renewed, and picked up by a running agent."""

import threading

from client_agent.coordinator import calls
from client_agent.coordinator.connection import open_http
from client_agent.errors import RequestRefused, StateError, StopRequested
from client_agent.settings import Identity
from client_agent.state.folder import StateFolder
from shared.contract.errors import DistransError

_MAX_CHARACTERS = 512
_POLL_INTERVAL_S = 1.0
_KEPT = "Nothing was changed."


class CurrentToken:
    """The token in identity.json, which `distrans-agent token` may replace at any time."""

    def __init__(self, state: StateFolder, token: str) -> None:
        self._state, self._token = state, token
        self._seen: object = None

    def __call__(self) -> str:
        """Return the token; read the file again if it was replaced, and keep the old token if it cannot be read."""
        try:
            seen = self._state.identity_version()
            if seen != self._seen:
                self._token, self._seen = self._state.identity().token, seen
        except (OSError, StateError):  # such as a failing disk; the token may still be valid
            pass
        return self._token

    def wait_for_another(self, refused: str, stopping: threading.Event) -> None:
        """Wait until the token differs from the refused one; raise StopRequested if the agent is asked to stop."""
        while self() == refused:
            if stopping.wait(_POLL_INTERVAL_S):
                raise StopRequested


def replace_token(folder: StateFolder, token: str) -> Identity:
    """Check with the coordinator that a token belongs to this client, then store it."""
    identity = folder.identity()
    _check_form(token)
    try:
        _check_owner(identity, token)
    except RequestRefused as error:
        if error.code != "invalid-token":
            raise
        raise DistransError(
            f"The coordinator does not accept this token. {_KEPT}",
            next_step="Copy the whole token that distrans-server client rotate printed.",
        ) from error
    return _save(folder, identity, token)


def renew_token(folder: StateFolder) -> bool:
    """Get a new token from the coordinator and store it; return whether the coordinator confirmed it.

    The old token stays valid until the new one is first used, which happens only after it is stored: a crash, a lost
    answer or a full disk at any point leaves a valid token.
    """
    identity = folder.identity()
    try:
        with open_http(identity.connection, identity.token) as http:
            answer = calls.renew_token(http)
    except RequestRefused as error:
        if error.status not in (404, 405):
            raise
        raise DistransError(
            f"The coordinator runs an older release that cannot renew tokens. {_KEPT}",
            next_step="Ask its operator to run distrans-server client rotate, "
            "and give the new token to: distrans-agent token.",
        ) from error
    _check_form(answer.token)
    if answer.client_id != identity.client_id:
        raise DistransError(f"The coordinator sent a token of another client. {_KEPT}")
    _save(folder, identity, answer.token)
    try:
        _check_owner(identity, answer.token)
    except RequestRefused as error:
        if error.code != "invalid-token":  # too busy to answer; a running agent may already use the new one
            return False
        folder.save_identity(identity)
        raise DistransError(
            f"The coordinator does not accept the token it just issued: {error.message} The old one is back in use.",
            next_step="If the token was renewed twice at the same time, run the command again.",
        ) from error
    except DistransError:  # it cannot be reached right now
        return False
    return True


def looks_like_token(text: str) -> bool:
    """Return whether a text could be a token or an invite."""
    return text.isascii() and text.isprintable() and text.split() == [text] and len(text) <= _MAX_CHARACTERS


def _check_form(token: str) -> None:
    if not looks_like_token(token):
        raise DistransError(
            f"The token is empty, too long, or contains characters that tokens do not have. {_KEPT}",
            next_step="Copy the whole token, without spaces or line breaks.",
        )


def _check_owner(identity: Identity, token: str) -> None:
    with open_http(identity.connection, token) as http:
        found = calls.own_record(http)
    if (found.id, found.federation) != (identity.client_id, identity.federation):
        raise DistransError(
            f"The token belongs to client {found.name!r} of federation {found.federation!r} (id {found.id}), "
            f"this folder to client {identity.name!r} of federation {identity.federation!r} (id {identity.client_id}). "
            f"{_KEPT}",
            next_step="Check --state; a site that joined again has another folder.",
        )


def _save(folder: StateFolder, identity: Identity, token: str) -> Identity:
    changed = identity.model_copy(update={"token": token})
    folder.save_identity(changed)
    return changed
