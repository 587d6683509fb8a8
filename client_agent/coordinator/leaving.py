"""Leaving a federation."""

from client_agent.coordinator import calls
from client_agent.coordinator.connection import open_http
from client_agent.errors import RequestRefused
from client_agent.state.folder import StateFolder

REJOIN_ADVICE = "To take part again, join with a new invite and another --state folder."


def leave_federation(folder: StateFolder) -> bool:
    """Leave, keeping what the folder needs to serve the last model; return False if the site had already left."""
    identity = folder.identity()
    has_just_left = not identity.has_left
    if has_just_left:
        with open_http(identity.connection, identity.token) as http:
            try:
                calls.leave(http)
            except RequestRefused as error:
                if error.code not in ("client-left", "client-revoked"):
                    raise
                has_just_left = False
        folder.save_identity(identity.model_copy(update={"has_left": True}))
    return has_just_left
