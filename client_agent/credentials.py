"""A site's token: replaced, renewed, given up; and followed by an agent that runs meanwhile."""

import threading

from client_agent import coordinator
from client_agent.errors import Refused, StateError, Stopped
from client_agent.network import open_http
from client_agent.settings import Identity
from client_agent.state import StateFolder
from shared.problems import DistransError

HOW_TO_RETURN = "To take part again, join with a new invite and another --state folder."
_MAX_CHARACTERS = 512
_LOOK_EVERY_S = 1.0
_KEPT = "Nothing was changed."


class CurrentToken:
    """The token in identity.json; `distrans-agent token` may replace it at any time."""

    def __init__(self, state: StateFolder, token: str) -> None:
        self._state, self._token = state, token
        self._seen: object = None

    def __call__(self) -> str:
        """Read the file again if it is another one; what cannot be read changes nothing."""
        try:
            seen = self._state.identity_version()
            if seen != self._seen:
                self._token, self._seen = self._state.identity().token, seen
        except (OSError, StateError):  # such as a disk that fails; the token may well be valid
            pass
        return self._token

    def wait_for_another(self, refused: str, stopping: threading.Event) -> None:
        """Until there is another token than the refused one; raises Stopped when the agent is to end."""
        while self() == refused:
            if stopping.wait(_LOOK_EVERY_S):
                raise Stopped


def replace_token(folder: StateFolder, token: str) -> Identity:
    """Use another token of the same client from now on; it is saved only if the coordinator knows it as that."""
    identity = folder.identity()
    _check_form(token)
    try:
        _check_owner(identity, token)
    except Refused as error:
        if error.code != "invalid-token":
            raise
        raise DistransError(
            f"The coordinator does not accept this token. {_KEPT}",
            next_step="Copy the whole token that distrans-server client rotate has printed.",
        ) from error
    return _save(folder, identity, token)


def renew_token(folder: StateFolder) -> bool:
    """Ask the coordinator for a new token and use it from now on; returns whether it has confirmed the new one.

    The old one is valid until the new one is used for the first time, which happens after it was saved: a crash, a lost
    answer or a full disk at any point leaves a token that works.
    """
    identity = folder.identity()
    try:
        with open_http(identity.connection, identity.token) as http:
            answer = coordinator.renew_token(http)
    except Refused as error:
        if error.status not in (404, 405):
            raise
        raise DistransError(
            f"The coordinator is of an older release, which cannot renew tokens. {_KEPT}",
            next_step="Ask its operator for a token from distrans-server client rotate, "
            "and give it to: distrans-agent token.",
        ) from error
    _check_form(answer.token)
    if answer.client_id != identity.client_id:
        raise DistransError(f"The coordinator answered with a token of another client. {_KEPT}")
    _save(folder, identity, answer.token)
    try:
        _check_owner(identity, answer.token)
    except Refused as error:
        if error.code != "invalid-token":  # too busy to say; a running agent may use the new one already
            return False
        folder.save_identity(identity)
        raise DistransError(
            f"The coordinator does not accept the token that it gave out: {error.message} The old one is in use again.",
            next_step="If it was renewed twice at the same time, run the command again.",
        ) from error
    except DistransError:  # it cannot be reached just now
        return False
    return True


def leave_federation(folder: StateFolder) -> bool:
    """Leave; the folder keeps what it needs to serve the last model. Returns False when that had happened before."""
    identity = folder.identity()
    is_news = not identity.has_left
    if is_news:
        with open_http(identity.connection, identity.token) as http:
            try:
                coordinator.leave(http)
            except Refused as error:
                if error.code not in ("client-left", "client-revoked"):
                    raise
                is_news = False
        folder.save_identity(identity.model_copy(update={"has_left": True}))
    return is_news


def _check_form(token: str) -> None:
    if not (token.isascii() and token.isprintable() and token.split() == [token]) or len(token) > _MAX_CHARACTERS:
        raise DistransError(
            f"The token is empty, too long, or has characters that no token has. {_KEPT}",
            next_step="Copy the whole token, without spaces or line breaks.",
        )


def _check_owner(identity: Identity, token: str) -> None:
    with open_http(identity.connection, token) as http:
        found = coordinator.own_record(http)
    if (found.id, found.federation) != (identity.client_id, identity.federation):
        raise DistransError(
            f"The token belongs to client {found.name!r} of federation {found.federation!r}, this folder to client "
            f"{identity.name!r} of federation {identity.federation!r} with another id. {_KEPT}",
            next_step="Check --state; a site that joined again has another folder.",
        )


def _save(folder: StateFolder, identity: Identity, token: str) -> Identity:
    changed = identity.model_copy(update={"token": token})
    folder.save_identity(changed)
    return changed
