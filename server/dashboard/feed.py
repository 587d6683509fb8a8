"""The activity feed: what happened lately in a federation, in sentences."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from server.service.insights.activity import RoundEnd
from shared.contract.messages import AuditView

MOST = 9
# Rounds are told from their own rows, which are complete.
_SENTENCES = {
    "federation.create": "Federation created",
    "federation.start": "Federation started",
    "federation.pause": "Federation paused",
    "federation.paused": "Federation paused by the coordinator: {reason}",
    "federation.resume": "Federation resumed",
    "federation.cancel": "Federation cancelled",
    "federation.finished": "Federation finished: {reason}",
    "federation.rollback": "Rolled back to model {to}",
    "federation.import": "Federation imported",
    "federation.export": "Federation exported",
    "invite.create": "Invite created",
    "invite.revoke": "Invite revoked",
    "client.join": "{actor} joined",
    "client.leave": "{client} left",
    "client.revoke": "Access of {client} revoked",
    "client.rotate": "New token for {client}",
    "client.update": "{actor} updated its class counts",
}


@dataclass(frozen=True)
class Item:
    """Something that happened."""

    at: float
    text: str
    kind: str = "neutral"  # of the badge
    label: str = ""


def feed(entries: Sequence[AuditView], ends: Sequence[RoundEnd]) -> list[Item]:
    """Return the newest items of both, newest first."""
    items = [_of_round(end) for end in ends]
    items += [item for entry in entries if (item := _of_entry(entry)) is not None]
    return sorted(items, key=lambda item: -item.at)[:MOST]


def _of_round(end: RoundEnd) -> Item:
    if not end.participants:  # a rollback, which is in the audit log
        return Item(end.at, f"Model {end.number} published again", "info", "model")
    if end.state == "failed":
        return Item(end.at, f"Round {end.number} failed: {end.reason}", "bad", "failed")
    return Item(end.at, f"Round {end.number} aggregated · {end.updates} of {end.participants} sites", "good", "round")


def _of_entry(entry: AuditView) -> Item | None:
    sentence = _SENTENCES.get(entry.action)
    if sentence is None:
        return None
    detail = json.loads(entry.detail) if entry.detail else {}
    values = {"actor": entry.actor.removeprefix("client:"), "client": "a site", "to": "?", "reason": ""}
    values |= {key: str(value)[:200] for key, value in detail.items()}
    text = sentence.format_map(values).removesuffix(": ")
    return Item(entry.at, text, label=entry.action.partition(".")[0])
