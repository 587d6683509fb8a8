import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.core.lifecycle import (
    Aggregate,
    Fail,
    ParticipantSnapshot,
    RoundSnapshot,
    StartClock,
    Waiting,
    decide_round,
    describe_waiting,
)
from shared.contract.plan import RoundsPlan

OPENED, DEADLINE = 1000.0, 1600.0
RULES = RoundsPlan(deadline_s=600, quorum=0.5, upload_idle_s=60, upload_grace_s=300)
GRACE_ENDS = DEADLINE + 300
CITIES = ("north", "south", "east", "west", "centre", "coast", "hills")


def uploaded(name: str = "done", *, active: bool = True) -> ParticipantSnapshot:
    return ParticipantSnapshot(name, active=active, uploaded=True)


def missing(name: str = "late", *, last_byte_at: float | None = None) -> ParticipantSnapshot:
    return ParticipantSnapshot(name, active=True, uploaded=False, last_byte_at=last_byte_at)


def left(name: str = "gone") -> ParticipantSnapshot:
    return ParticipantSnapshot(name, active=False, uploaded=False)


def judge(
    *clients: ParticipantSnapshot, now: float = OPENED, rules: RoundsPlan = RULES
) -> Waiting | StartClock | Aggregate | Fail:
    return decide_round(RoundSnapshot(DEADLINE, clients), rules, now)


clients = st.builds(
    ParticipantSnapshot,
    name=st.sampled_from(CITIES),
    active=st.booleans(),
    uploaded=st.booleans(),
    last_byte_at=st.none() | st.floats(OPENED, GRACE_ENDS),
)
rounds = st.lists(clients, min_size=1, max_size=12)
times = st.floats(OPENED, GRACE_ENDS + 1000)
quorums = st.floats(0.01, 1)


class TestRound:
    def test_waits_for_those_who_have_not_uploaded(self) -> None:
        decision = judge(uploaded(), missing("north"), uploaded(), missing("south"), uploaded())
        assert decision == Waiting("2 of 5 clients", DEADLINE, ("north", "south"))

    def test_is_complete_before_its_deadline_once_everybody_has_uploaded(self) -> None:
        assert judge(uploaded(), uploaded()) == Aggregate()

    def test_does_not_wait_for_clients_that_left(self) -> None:
        assert judge(uploaded(), left()) == Aggregate()

    def test_counts_the_update_of_a_client_that_left_after_it(self) -> None:
        assert judge(uploaded(active=False)) == Aggregate()

    def test_fails_when_all_left_without_an_update(self) -> None:
        assert judge(left(), left()) == Fail("every participant left before uploading")

    def test_takes_a_quorum_at_the_deadline(self) -> None:
        assert isinstance(judge(uploaded(), missing(), now=math.nextafter(DEADLINE, 0)), Waiting)
        assert judge(uploaded(), missing(), now=DEADLINE) == Aggregate()

    def test_fails_below_the_quorum_and_says_who_is_missing(self) -> None:
        decision = judge(uploaded(), missing("north"), missing("south"), now=DEADLINE)
        assert decision == Fail(
            "only 1 of 3 updates arrived before the deadline, 2 are needed", detail="missing: north, south"
        )

    def test_fails_with_five_names_of_many(self) -> None:
        decision = judge(*[missing(name) for name in CITIES], now=DEADLINE)
        assert isinstance(decision, Fail)
        assert decision.detail == "missing: north, south, east, west, centre …"

    def test_needs_one_update_whatever_the_quorum(self) -> None:
        assert isinstance(judge(missing(), now=DEADLINE, rules=RoundsPlan(quorum=1e-12)), Fail)

    def test_takes_the_quorum_of_those_that_stayed(self) -> None:
        assert judge(uploaded(), missing(), left(), left(), now=DEADLINE) == Aggregate()


def unseen(name: str = "silent") -> ParticipantSnapshot:
    return ParticipantSnapshot(name, active=True, uploaded=False, seen=False)


class TestFirstContact:
    """The upload deadline does not run before a quorum of the participants has connected."""

    @staticmethod
    def judge(*clients: ParticipantSnapshot, now: float = OPENED) -> Waiting | StartClock | Aggregate | Fail:
        return decide_round(RoundSnapshot(DEADLINE, clients, clock_started=False), RULES, now)

    def test_is_waited_for(self) -> None:
        decision = self.judge(missing("north"), unseen("south"), unseen("east"), unseen("west"))
        what = "1 of 4 clients to connect"
        assert decision == Waiting(what, DEADLINE, ("south", "east", "west"))

    def test_of_a_quorum_starts_the_clock(self) -> None:
        assert self.judge(missing(), missing(), unseen(), unseen()) == StartClock()
        assert self.judge(missing(), uploaded(), unseen(), unseen()) == StartClock()

    def test_of_those_that_left_is_not_waited_for(self) -> None:
        assert self.judge(missing(), unseen(), left(), left()) == StartClock()

    def test_is_not_needed_where_everybody_has_uploaded(self) -> None:
        assert self.judge(uploaded(), left()) == Aggregate()

    def test_is_not_waited_for_forever(self) -> None:
        decision = self.judge(missing(), unseen("a"), unseen("b"), unseen("c"), now=DEADLINE)
        assert decision == Fail("only 1 of 4 clients connected in time, 2 are needed", "not seen: a, b, c")

    @given(rounds, times, quorums, st.lists(st.booleans(), min_size=12, max_size=12))
    def test_is_waited_for_or_judged_within_the_bound(
        self, members: list[ParticipantSnapshot], now: float, quorum: float, seen: list[bool]
    ) -> None:
        clients = tuple(replace(client, seen=flag) for client, flag in zip(members, seen, strict=False))
        snapshot = RoundSnapshot(DEADLINE, clients, clock_started=False)
        decision = decide_round(snapshot, RoundsPlan(quorum=quorum), now)
        if isinstance(decision, Waiting):
            assert now < DEADLINE
            assert decision.until == DEADLINE


class TestArrivingUpload:
    """An upload still in progress at the deadline is waited for, within limits."""

    def test_is_waited_for_even_when_there_is_a_quorum(self) -> None:
        decision = judge(uploaded(), missing("slow", last_byte_at=DEADLINE - 1), now=DEADLINE)
        what = "1 of 2 clients still uploading after the deadline"
        assert decision == Waiting(what, GRACE_ENDS, ("slow",))

    def test_names_only_what_arrives(self) -> None:
        decision = judge(missing("absent"), missing("slow", last_byte_at=DEADLINE), now=DEADLINE + 1)
        assert isinstance(decision, Waiting)
        assert decision.names == ("slow",)

    def test_is_given_up_after_the_idle_limit(self) -> None:
        slow = missing(last_byte_at=DEADLINE)
        assert isinstance(judge(uploaded(), slow, now=math.nextafter(DEADLINE + 60, 0)), Waiting)
        assert judge(uploaded(), slow, now=DEADLINE + 60) == Aggregate()

    def test_is_no_longer_waited_for_when_the_grace_ends(self) -> None:
        slow = missing(last_byte_at=GRACE_ENDS)
        assert isinstance(judge(uploaded(), slow, now=math.nextafter(GRACE_ENDS, 0)), Waiting)
        assert judge(uploaded(), slow, now=GRACE_ENDS) == Aggregate()

    def test_of_a_client_that_left_is_not_waited_for(self) -> None:
        gone = ParticipantSnapshot("gone", active=False, uploaded=False, last_byte_at=DEADLINE)
        assert judge(uploaded(), gone, now=DEADLINE) == Aggregate()

    def test_gets_no_grace_where_the_plan_gives_none(self) -> None:
        rules = RoundsPlan(quorum=0.5, upload_grace_s=0)
        assert judge(uploaded(), missing(last_byte_at=DEADLINE), now=DEADLINE, rules=rules) == Aggregate()


ABSENT = RoundsPlan(deadline_s=600, quorum=0.5, absent_after_s=200)


def silent(
    name: str = "dead", *, heard_at: float = OPENED, seen: bool = True, reports: bool = True
) -> ParticipantSnapshot:
    return ParticipantSnapshot(name, active=True, uploaded=False, seen=seen, heard_at=heard_at, reports=reports)


class TestAbsence:
    """A client silent for a given time is not waited for if there is a quorum."""

    def test_ends_the_wait_once_all_others_have_uploaded(self) -> None:
        clients = uploaded(), uploaded(), silent()
        decision = judge(*clients, now=math.nextafter(OPENED + 200, 0), rules=ABSENT)
        assert decision == Waiting("1 of 3 clients", DEADLINE, ("dead",), recheck_at=OPENED + 200)
        assert judge(*clients, now=OPENED + 200, rules=ABSENT) == Aggregate()

    def test_does_not_end_it_while_a_present_client_trains(self) -> None:
        training = silent("slow", heard_at=OPENED + 290)
        decision = judge(uploaded(), uploaded(), training, silent(), now=OPENED + 300, rules=ABSENT)
        what = "2 of 4 clients, 1 of them absent"
        assert decision == Waiting(what, DEADLINE, ("slow", "dead"), recheck_at=OPENED + 490)

    def test_does_not_lower_the_quorum(self) -> None:
        decision = judge(uploaded(), silent("a"), silent("b"), now=OPENED + 300, rules=ABSENT)
        assert isinstance(decision, Waiting)
        assert decision.recheck_at is None, "before another upload time alone changes nothing"

    def test_of_an_agent_that_cannot_report_is_not_known_while_it_may_be_training(self) -> None:
        older = silent("older", reports=False)
        decision = judge(uploaded(), older, now=OPENED + 300, rules=ABSENT)
        assert decision == Waiting("1 of 2 clients", DEADLINE, ("older",), recheck_at=OPENED + 500)
        assert isinstance(judge(uploaded(), older, now=DEADLINE - 1, rules=ABSENT), Waiting)
        assert judge(uploaded(), older, now=DEADLINE, rules=ABSENT) == Aggregate()
        unseen_older = silent("older", reports=False, seen=False)
        assert judge(uploaded(), unseen_older, now=OPENED + 200, rules=ABSENT) == Aggregate()

    def test_ends_when_bytes_arrive(self) -> None:
        uploading = replace(silent(), last_byte_at=OPENED + 250)
        assert isinstance(judge(uploaded(), uploading, now=OPENED + 300, rules=ABSENT), Waiting)

    @given(rounds, times, quorums, st.lists(st.floats(OPENED - 500, DEADLINE), min_size=12, max_size=12))
    def test_only_ever_ends_a_round_earlier_and_as_its_deadline_would(
        self, members: list[ParticipantSnapshot], now: float, quorum: float, heard: list[float]
    ) -> None:
        rules = ABSENT.model_copy(update={"quorum": quorum, "upload_grace_s": 0.0})
        clients = [replace(client, heard_at=at) for client, at in zip(members, heard, strict=False)]
        decision, patient = judge(*clients, now=now, rules=rules), judge(*members, now=now, rules=rules)
        if type(decision) is not type(patient):
            assert (decision, type(patient)) == (Aggregate(), Waiting)
            assert judge(*members, now=DEADLINE, rules=rules) == Aggregate()
        if isinstance(decision, Waiting) and decision.recheck_at is not None:
            assert now < decision.recheck_at < DEADLINE
            if decision.recheck_at < now + rules.absent_after_s:
                assert judge(*clients, now=decision.recheck_at, rules=rules) == Aggregate()


class TestDefaultQuorum:
    @pytest.mark.parametrize(("total", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (10, 7)])
    def test_does_without_one_site_of_three(self, total: int, needed: int) -> None:
        late = [missing()] * (total - needed)
        assert judge(*[uploaded()] * needed, *late, now=DEADLINE, rules=RoundsPlan()) == Aggregate()
        decision = judge(*[uploaded()] * (needed - 1), *late, missing(), now=DEADLINE, rules=RoundsPlan())
        assert isinstance(decision, Fail)


class TestEveryRound:
    @given(rounds, times, quorums)
    def test_waits_before_the_deadline_exactly_while_somebody_is_missing(
        self, members: list[ParticipantSnapshot], now: float, quorum: float
    ) -> None:
        decision = judge(*members, now=now, rules=RoundsPlan(quorum=quorum, upload_grace_s=300))
        if not any(client.active and not client.uploaded for client in members):
            assert isinstance(decision, Aggregate) == any(client.uploaded for client in members)
        elif now < DEADLINE:
            assert isinstance(decision, Waiting)

    @given(rounds, st.floats(GRACE_ENDS, GRACE_ENDS + 1e6), quorums)
    def test_ends_when_the_grace_does(self, members: list[ParticipantSnapshot], now: float, quorum: float) -> None:
        rules = RoundsPlan(quorum=quorum, upload_grace_s=300)
        assert not isinstance(judge(*members, now=now, rules=rules), Waiting)

    @given(rounds, times, st.integers(0, 3))
    def test_does_not_see_clients_that_left_without_an_update(
        self, members: list[ParticipantSnapshot], now: float, more: int
    ) -> None:
        assert judge(*members, *[left()] * more, now=now) == judge(*members, now=now)

    @given(rounds, times, st.randoms(use_true_random=False))
    def test_is_judged_alike_in_any_order(self, members: list[ParticipantSnapshot], now: float, chance: Random) -> None:
        decision = judge(*members, now=now)
        shuffled = judge(*chance.sample(members, len(members)), now=now)
        assert type(shuffled) is type(decision)

    @given(rounds, times, quorums)
    def test_is_never_worse_off_for_one_more_update(
        self, members: list[ParticipantSnapshot], now: float, quorum: float
    ) -> None:
        rules = RoundsPlan(quorum=quorum, upload_grace_s=300)
        before = judge(*members, now=now, rules=rules)
        for place, client in enumerate(members):
            if client.active and not client.uploaded:
                after = judge(*members[:place], uploaded(), *members[place + 1 :], now=now, rules=rules)
                assert not isinstance(after, Fail) or isinstance(before, Fail | Waiting)
                assert not isinstance(before, Aggregate) or isinstance(after, Aggregate)

    @given(rounds, times)
    def test_that_waits_says_until_when_and_that_is_ahead(self, members: list[ParticipantSnapshot], now: float) -> None:
        decision = judge(*members, now=now)
        if isinstance(decision, Waiting):
            assert decision.until is not None
            assert now < decision.until <= GRACE_ENDS

    @given(st.integers(1, 2000).flatmap(lambda total: st.tuples(st.integers(1, total), st.just(total))))
    @example((1, 3))
    @example((7, 25))
    @example((2, 3))
    def test_needs_exactly_the_share_that_the_plan_asks_for(self, share: tuple[int, int]) -> None:
        """A quorum of k/n of n clients means k, however the fraction is rounded."""
        needed, total = share
        rules = RoundsPlan(quorum=needed / total)
        late = [missing()] * (total - needed)
        assert judge(*[uploaded()] * needed, *late, now=DEADLINE, rules=rules) == Aggregate()
        decision = judge(*[uploaded()] * (needed - 1), *late, missing(), now=DEADLINE, rules=rules)
        assert isinstance(decision, Fail)
        assert f"{needed} are needed" in decision.reason

    @given(rounds, times)
    def test_that_waits_is_described_in_one_line(self, members: list[ParticipantSnapshot], now: float) -> None:
        decision = judge(*members, now=now)
        if isinstance(decision, Waiting):
            words = describe_waiting(decision, now)
            assert words.startswith("waiting for ")
            assert "; deadline in " in words
            assert "\n" not in words
            assert not any(city in words for city in CITIES)
