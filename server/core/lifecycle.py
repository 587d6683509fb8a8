"""The state machine of federations and rounds: snapshots in, decisions out.

federation:  created ─start→ running ⇄ paused           created, running, paused ─cancel→ cancelled
                             running → finished         finished ─rollback→ paused
round:       open → aggregating → done                  open, aggregating → failed
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from server.core.errors import short_list
from shared.contract.plan import MIN_ABSENT_AFTER_S, RoundsPlan

FederationState = Literal["created", "running", "paused", "finished", "cancelled"]
RoundState = Literal["open", "aggregating", "done", "failed"]
ENDED: tuple[FederationState, ...] = ("finished", "cancelled")
UNDER_WAY: tuple[RoundState, ...] = ("open", "aggregating")
_NAMED = 5  # clients named in one message


@dataclass(frozen=True)
class ParticipantSnapshot:
    """One client's part in a round."""

    name: str
    active: bool  # False once it has left or was revoked
    uploaded: bool
    last_byte_at: float | None = None  # of an upload in progress
    seen: bool = True  # has been handed this round
    heard_at: float = math.inf  # last sign of life from its agent
    reports: bool = True  # also while training; agents of older releases do not

    def absent_at(self, rules: RoundsPlan) -> float:
        """Return when it counts as absent unless it is heard from again.

        An agent that trains without reporting looks just like a dead one, so it is waited for until the deadline.
        """
        if self.seen and not self.reports:
            return math.inf
        return max(self.heard_at, self.last_byte_at or 0.0) + rules.absent_after_s


@dataclass(frozen=True)
class RoundSnapshot:
    """An open round.

    Until a quorum of its participants has been seen, `deadline_at` is when to give up waiting for them.
    """

    deadline_at: float
    participants: tuple[ParticipantSnapshot, ...]
    clock_started: bool = True


@dataclass(frozen=True)
class Waiting:
    """Nothing to do yet. Only the operator may see the names.

    `recheck_at` is when the passing of time may change the decision before anything is overdue.
    """

    what: str
    until: float | None
    names: tuple[str, ...] = ()
    recheck_at: float | None = None
    since: float = 0.0  # for people to read; the core does not know it


@dataclass(frozen=True)
class StartClock:
    """A quorum of the participants has connected: the upload deadline starts to run."""


@dataclass(frozen=True)
class Aggregate:
    """No more updates are expected."""


@dataclass(frozen=True)
class Fail:
    """The round cannot be completed. Anyone may read the reason, only the operator the detail."""

    reason: str
    detail: str = ""


def decide_round(round_: RoundSnapshot, rules: RoundsPlan, now: float) -> Waiting | StartClock | Aggregate | Fail:
    """Decide what to do with an open round.

    Clients that left without uploading do not count. A quorum of the participants is enough at the deadline, or earlier
    once all the others are absent; absent clients still count as participants. An upload still in progress at the
    deadline gets up to `upload_grace_s` more.
    """
    uploaded = [client for client in round_.participants if client.uploaded]
    missing = [client for client in round_.participants if client.active and not client.uploaded]
    if not missing:
        return Aggregate() if uploaded else Fail("every participant left before uploading")
    total = len(uploaded) + len(missing)
    needed = max(1, math.ceil(total * rules.quorum - 1e-9))
    all_absent_at = max(client.absent_at(rules) for client in missing)
    has_quorum = len(uploaded) >= needed
    if has_quorum and now >= all_absent_at:
        return Aggregate()
    if not round_.clock_started:
        return _decide_unseen(round_, [client for client in missing if not client.seen], total, needed, now)
    if now < round_.deadline_at:
        what, recheck_at = f"{len(missing)} of {total} clients", None
        if absent := sum(now >= client.absent_at(rules) for client in missing):
            what += f", {absent} of them absent"
        if has_quorum:  # by then the site may have replaced an agent that cannot report
            recheck_at = min(all_absent_at, now + rules.absent_after_s)
        if recheck_at is not None and recheck_at >= round_.deadline_at:
            recheck_at = None
        return Waiting(what, round_.deadline_at, _names(missing), recheck_at)
    arriving = [client for client in missing if _still_arriving(client, rules, now)]
    grace_ends = round_.deadline_at + rules.upload_grace_s
    if arriving and now < grace_ends:
        what = f"{len(arriving)} of {total} clients still uploading after the deadline"
        return Waiting(what, grace_ends, _names(arriving))
    if has_quorum:
        return Aggregate()
    reason = f"only {len(uploaded)} of {total} updates arrived before the deadline, {needed} are needed"
    return Fail(reason, f"missing: {short_list(_names(missing), _NAMED)}")


def _decide_unseen(
    round_: RoundSnapshot, unseen: list[ParticipantSnapshot], total: int, needed: int, now: float
) -> Waiting | StartClock | Fail:
    seen = total - len(unseen)
    if seen >= needed:
        return StartClock()
    if now < round_.deadline_at:
        what = f"{needed - seen} of {total} clients to connect"
        return Waiting(what, round_.deadline_at, _names(unseen))
    reason = f"only {seen} of {total} clients connected in time, {needed} are needed"
    return Fail(reason, f"not seen: {short_list(_names(unseen), _NAMED)}")


def _names(clients: list[ParticipantSnapshot]) -> tuple[str, ...]:
    return tuple(client.name for client in clients)


def _still_arriving(client: ParticipantSnapshot, rules: RoundsPlan, now: float) -> bool:
    return client.last_byte_at is not None and now - client.last_byte_at < rules.upload_idle_s


@dataclass(frozen=True)
class OpenRound:
    """Open the next round."""


@dataclass(frozen=True)
class Finish:
    """The federation is complete."""

    reason: str


def decide_federation(
    rules: RoundsPlan,
    *,
    completed_rounds: int,
    active_clients: int,
    absent: Collection[str] = (),
    waiting_since: float,
    latest_accuracy: float | None,
    stale_rounds: int,
    now: float,
) -> OpenRound | Finish | Waiting | Fail:
    """Decide what to do with a running federation between rounds; Fail means: pause it with that reason.

    `absent` names the active clients that have been silent for `absent_after_s`.
    """
    if completed_rounds >= rules.count:
        return Finish(f"all {rules.count} rounds are done")
    if rules.target_accuracy is not None and latest_accuracy is not None and latest_accuracy >= rules.target_accuracy:
        return Finish(f"the pooled accuracy {latest_accuracy:.4f} reached the target {rules.target_accuracy}")
    if rules.patience is not None and stale_rounds >= rules.patience:
        return Finish(f"the accuracy has not improved for {stale_rounds} rounds")
    present = active_clients - len(absent)
    if present >= rules.min_clients:
        return OpenRound()
    until = waiting_since + rules.join_deadline_s
    if active_clients < rules.min_clients:
        if now >= until:
            return Fail(f"only {active_clients} of {rules.min_clients} clients joined before the join deadline")
        return Waiting(f"clients to join: {active_clients} of at least {rules.min_clients}", until)
    names = tuple(sorted(absent))
    if now >= until:
        reason = f"only {present} of at least {rules.min_clients} clients were present at the join deadline"
        return Fail(reason, f"absent: {short_list(names, _NAMED)}")
    what = f"clients to connect: {present} of at least {rules.min_clients} are present"
    return Waiting(what, until, names, recheck_at=now + rules.absent_after_s)


@dataclass(frozen=True)
class LastContact:
    """What the coordinator last heard from a participant whose update is missing."""

    state: str
    last_seen_at: float
    silent_s: float  # in uptime
    reports: bool
    detail: str  # the activity it last reported
    troubles: tuple[str, ...] = ()


def explain_missing(contact: LastContact) -> str:
    """Explain why a participant's update is missing, as far as the coordinator can know."""
    if contact.state != "active":
        return contact.state
    seen = datetime.fromtimestamp(contact.last_seen_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if contact.troubles:
        reason = f"reported: {'; '.join(contact.troubles)}"
        return reason if contact.silent_s < MIN_ABSENT_AFTER_S else f"{reason}; not seen since {seen}"
    if not contact.reports:
        return f"last seen {seen}; its agent does not report its activity"
    if contact.silent_s >= MIN_ABSENT_AFTER_S:
        return f"not seen since {seen}; last reported: {contact.detail}"
    return f"seen, last reported: {contact.detail}"


def describe_waiting(waiting: Waiting, now: float, *, for_operator: bool = False) -> str:
    """Return e.g. `waiting for 2 of 5 clients: north, south; deadline in 8 min`; clients see no names."""
    text = f"waiting for {waiting.what}"
    if for_operator and waiting.names:
        text += f": {short_list(waiting.names, _NAMED)}"
    return text if waiting.until is None else f"{text}; deadline in {format_duration(max(0.0, waiting.until - now))}"


def format_duration(seconds: float) -> str:
    """Format a duration for people, rounded up: `90 s`, `8 min`, `3 h`, `2 days`."""
    units = (("s", 1, 120), ("min", 60, 2 * 3600), ("h", 3600, 48 * 3600), ("days", 86400, math.inf))
    name, unit_s = next((name, unit_s) for name, unit_s, below_s in units if seconds < below_s)
    # Clocks of two processes differ by moments: a deadline of a week must not read "8 days".
    return f"{math.ceil(round(seconds / unit_s, 2))} {name}"
