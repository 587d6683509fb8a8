"""What a person should know first: endings, troubles, and a pin that cannot be followed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from client_agent.errors import Ending
from client_agent.status import TroubleKind

_ENDINGS = {
    Ending.LEFT: "This site has left the federation",
    Ending.REVOKED: "This site is no longer part of the federation",
    Ending.CANCELLED: "The federation was cancelled",
    Ending.INVALID_TOKEN: "The coordinator no longer accepts this site's token",
}
_TROUBLES = {
    TroubleKind.COORDINATOR: ("The coordinator cannot be used", "The agent keeps trying."),
    TroubleKind.DATA: ("The site's images cannot be used", "The agent looks again every minute."),
    TroubleKind.IMAGES: ("Some images cannot be read", "They are left out until they can."),
    TroubleKind.MODEL: ("A model cannot be used", "The agent tries again in 15 minutes at the latest."),
    TroubleKind.TRAINING: ("A round could not be trained here", "The agent waits for the next one."),
    TroubleKind.STORAGE: ("The agent's folder cannot be used", "Free space on the disk, or repair its permissions."),
    TroubleKind.PIN: ("The pin cannot be read", "The served model stays."),
    TroubleKind.UNEXPECTED: ("The agent ran into an unexpected error", "Its log has the details."),
}


@dataclass(frozen=True)
class Alert:
    """Something that a person should know first."""

    kind: str
    title: str
    text: str = ""
    next_step: str = ""


def alerts(info: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield them, from the body of `/info`."""
    agent, serving = info["agent"], info["serving"]
    goes_on = "" if serving is None else "Predictions continue."
    if agent["ended"]:
        yield Alert("warn", _ENDINGS[Ending(agent["ended"])], agent["outcome"], goes_on)
    elif agent["outcome"]:
        text = "Take the model with you: distrans-agent export model.safetensors" if serving else ""
        yield Alert("info", f"{agent['outcome'].rstrip('.')}.", f"{goes_on} {text}".strip())
    for trouble in agent["troubles"]:
        title, next_step = _TROUBLES[TroubleKind(trouble["kind"])]
        yield Alert("warn", title, trouble["message"], f"{next_step} {goes_on}".strip())
    if info["pinned"] is not None and (serving is None or serving["round"] != info["pinned"]):
        text = "It is being loaded, is no longer kept, or is damaged; distrans-agent status has the reason."
        yield Alert("warn", f"Model {info['pinned']} is pinned but not served", text, "Pin another one, or unpin it.")
