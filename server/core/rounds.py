"""The state machine of federations and rounds: snapshots in, decisions out.

federation:  created ─start→ running ⇄ paused          running, paused ─cancel→ cancelled
                             running → finished
round:       open → aggregating → done                  open → failed
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from shared.plan import MIN_ABSENT_AFTER_S, RoundsPlan

FederationState = Literal["created", "running", "paused", "finished", "cancelled"]
RoundState = Literal["open", "aggregating", "done", "failed"]
ENDED: tuple[FederationState, ...] = ("finished", "cancelled")


@dataclass(frozen=True)
class Participant:
    """One client's part in a round."""

    name: str
    active: bool  # False once it has left or was revoked
    uploaded: bool
    last_byte_at: float | None = None  # of an upload under way that grows
    seen: bool = True  # it has been handed this round
    heard_at: float = math.inf  # when its agent last gave a sign of life
    reports: bool = True  # its agent does so while it trains, too; those of older releases do not

    def absent_at(self, rules: RoundsPlan) -> float:
        """When it counts as absent unless it is heard from again.

        An agent that trains without reporting cannot be told from a dead one, so it is waited for until the deadline.
        """
        if self.seen and not self.reports:
            return math.inf
        return max(self.heard_at, self.last_byte_at or 0.0) + rules.absent_after_s


@dataclass(frozen=True)
class RoundSnapshot:
    """An open round as it stands now.

    Until a quorum of its participants has been seen, `deadline_at` is when to give up waiting for them.
    """

    number: int
    opened_at: float
    deadline_at: float
    participants: tuple[Participant, ...]
    clock_started: bool = True


@dataclass(frozen=True)
class Waiting:
    """Nothing to do yet: what for, since when, until when. Only the operator may learn the names.

    `look_at` is when time alone may change the verdict although nothing is overdue.
    """

    what: str
    since: float
    until: float | None
    names: tuple[str, ...] = ()
    look_at: float | None = None


@dataclass(frozen=True)
class StartClock:
    """A quorum of the participants is there: the time to upload begins."""


@dataclass(frozen=True)
class Aggregate:
    """All that will come has come."""


@dataclass(frozen=True)
class Fail:
    """The round cannot be completed. Everybody may read the reason, only the operator the detail."""

    reason: str
    detail: str = ""


def judge_round(round_: RoundSnapshot, rules: RoundsPlan, now: float) -> Waiting | StartClock | Aggregate | Fail:
    """What to do with an open round.

    Clients that left without an upload no longer count. At the deadline a quorum of the participants is enough, and
    before it as soon as all others are absent; absent ones still count as participants. An upload that still grows is
    waited for, within `upload_grace_s`.
    """
    uploaded = [client for client in round_.participants if client.uploaded]
    missing = [client for client in round_.participants if client.active and not client.uploaded]
    if not missing:
        return Aggregate() if uploaded else Fail("every participant left before it uploaded anything")
    total = len(uploaded) + len(missing)
    needed = max(1, math.ceil(total * rules.quorum - 1e-9))
    all_absent_at = max(client.absent_at(rules) for client in missing)
    has_quorum = len(uploaded) >= needed
    if has_quorum and now >= all_absent_at:
        return Aggregate()
    if not round_.clock_started:
        return _judge_unseen(round_, [client for client in missing if not client.seen], total, needed, now)
    if now < round_.deadline_at:
        what, look_at = f"{len(missing)} of {total} clients", None
        if absent := sum(now >= client.absent_at(rules) for client in missing):
            what += f", {absent} of them absent"
        if has_quorum:  # by then an agent that could not report may have been replaced by one that can
            look_at = min(all_absent_at, now + rules.absent_after_s)
        if look_at is not None and look_at >= round_.deadline_at:
            look_at = None
        return Waiting(what, round_.opened_at, round_.deadline_at, _names(missing), look_at)
    arriving = [client for client in missing if _still_arriving(client, rules, now)]
    grace_ends = round_.deadline_at + rules.upload_grace_s
    if arriving and now < grace_ends:
        what = f"{len(arriving)} of {total} clients that still upload past the deadline"
        return Waiting(what, round_.opened_at, grace_ends, _names(arriving))
    if has_quorum:
        return Aggregate()
    reason = f"only {len(uploaded)} of {total} updates came before the deadline, {needed} are needed"
    return Fail(reason, f"missing: {_listed(_names(missing))}")


def _judge_unseen(
    round_: RoundSnapshot, unseen: list[Participant], total: int, needed: int, now: float
) -> Waiting | StartClock | Fail:
    seen = total - len(unseen)
    if seen >= needed:
        return StartClock()
    if now < round_.deadline_at:
        what = f"{needed - seen} of {total} clients to connect"
        return Waiting(what, round_.opened_at, round_.deadline_at, _names(unseen))
    reason = f"only {seen} of {total} clients connected in time, {needed} are needed"
    return Fail(reason, f"not seen: {_listed(_names(unseen))}")


def _names(clients: list[Participant]) -> tuple[str, ...]:
    return tuple(client.name for client in clients)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


def _still_arriving(client: Participant, rules: RoundsPlan, now: float) -> bool:
    return client.last_byte_at is not None and now - client.last_byte_at < rules.upload_idle_s


@dataclass(frozen=True)
class OpenRound:
    """It is time for the next round."""


@dataclass(frozen=True)
class Finish:
    """The federation has ended."""

    reason: str


def judge_federation(
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
    """What to do with a running federation that has no round under way; Fail means: pause it with that reason.

    `absent` names those of the active clients that have not been heard from for `absent_after_s`.
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
            reason = f"only {active_clients} of {rules.min_clients} clients had joined when the time to join was over"
            return Fail(reason)
        return Waiting(f"clients to join: {active_clients} of at least {rules.min_clients}", waiting_since, until)
    names = tuple(sorted(absent))
    if now >= until:
        reason = (
            f"only {present} of at least {rules.min_clients} clients were present when the time to connect was over"
        )
        return Fail(reason, f"absent: {_listed(names)}")
    what = f"clients to connect: {present} of at least {rules.min_clients} are present"
    return Waiting(what, waiting_since, until, names, look_at=now + rules.absent_after_s)


@dataclass(frozen=True)
class LastSigns:
    """What is known of a participant whose update is missing; times are for people to read."""

    state: str
    last_seen_at: float
    silent_s: float  # in uptime
    reports: bool
    detail: str  # what it last reported to be doing
    troubles: tuple[str, ...] = ()


def explain_missing(signs: LastSigns) -> str:
    """Say in a few words why a participant's update is missing, as far as the coordinator can know."""
    if signs.state != "active":
        return signs.state
    seen = datetime.fromtimestamp(signs.last_seen_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if signs.troubles:
        reason = f"reported: {'; '.join(signs.troubles)}"
        return reason if signs.silent_s < MIN_ABSENT_AFTER_S else f"{reason}; not seen since {seen}"
    if not signs.reports:
        return f"last seen {seen}; its agent does not report what it does"
    if signs.silent_s >= MIN_ABSENT_AFTER_S:
        return f"not seen since {seen}; last reported: {signs.detail}"
    return f"seen, last reported: {signs.detail}"


def describe(waiting: Waiting, now: float, *, for_operator: bool = False) -> str:
    """`waiting for 2 of 5 clients: north, south; deadline in 8 min`; a client reads it without the names."""
    words = f"waiting for {waiting.what}"
    if for_operator and waiting.names:
        words += f": {_listed(waiting.names)}"
    return words if waiting.until is None else f"{words}; deadline in {_duration(max(0.0, waiting.until - now))}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    if seconds < 2 * 3600:
        return f"{math.ceil(seconds / 60)} min"
    return f"{math.ceil(seconds / 3600)} h" if seconds < 48 * 3600 else f"{math.ceil(seconds / 86400)} days"
