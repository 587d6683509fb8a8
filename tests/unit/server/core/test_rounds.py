import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.core.rounds import (
    Aggregate,
    Fail,
    Finish,
    LastSigns,
    OpenRound,
    Participant,
    RoundSnapshot,
    StartClock,
    Waiting,
    describe,
    explain_missing,
    judge_federation,
    judge_round,
)
from shared.plan import RoundsPlan

OPENED, DEADLINE = 1000.0, 1600.0
RULES = RoundsPlan(deadline_s=600, quorum=0.5, upload_idle_s=60, upload_grace_s=300)
GRACE_ENDS = DEADLINE + 300
CITIES = ("north", "south", "east", "west", "centre", "coast", "hills")


def uploaded(name: str = "done", *, active: bool = True) -> Participant:
    return Participant(name, active=active, uploaded=True)


def missing(name: str = "late", *, last_byte_at: float | None = None) -> Participant:
    return Participant(name, active=True, uploaded=False, last_byte_at=last_byte_at)


def left(name: str = "gone") -> Participant:
    return Participant(name, active=False, uploaded=False)


def judge(
    *clients: Participant, now: float = OPENED, rules: RoundsPlan = RULES
) -> Waiting | StartClock | Aggregate | Fail:
    return judge_round(RoundSnapshot(1, OPENED, DEADLINE, clients), rules, now)


clients = st.builds(
    Participant,
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
        verdict = judge(uploaded(), missing("north"), uploaded(), missing("south"), uploaded())
        assert verdict == Waiting("2 of 5 clients", OPENED, DEADLINE, ("north", "south"))

    def test_is_complete_before_its_deadline_once_everybody_has_uploaded(self) -> None:
        assert judge(uploaded(), uploaded()) == Aggregate()

    def test_does_not_wait_for_clients_that_left(self) -> None:
        assert judge(uploaded(), left()) == Aggregate()

    def test_counts_the_update_of_a_client_that_left_after_it(self) -> None:
        assert judge(uploaded(active=False)) == Aggregate()

    def test_fails_when_all_left_without_an_update(self) -> None:
        assert judge(left(), left()) == Fail("every participant left before it uploaded anything")

    def test_takes_a_quorum_at_the_deadline(self) -> None:
        assert isinstance(judge(uploaded(), missing(), now=math.nextafter(DEADLINE, 0)), Waiting)
        assert judge(uploaded(), missing(), now=DEADLINE) == Aggregate()

    def test_fails_below_the_quorum_and_says_who_is_missing(self) -> None:
        verdict = judge(uploaded(), missing("north"), missing("south"), now=DEADLINE)
        assert verdict == Fail(
            "only 1 of 3 updates came before the deadline, 2 are needed", detail="missing: north, south"
        )

    def test_fails_with_five_names_of_many(self) -> None:
        verdict = judge(*[missing(name) for name in CITIES], now=DEADLINE)
        assert isinstance(verdict, Fail)
        assert verdict.detail == "missing: north, south, east, west, centre …"

    def test_needs_one_update_whatever_the_quorum(self) -> None:
        assert isinstance(judge(missing(), now=DEADLINE, rules=RoundsPlan(quorum=1e-12)), Fail)

    def test_takes_the_quorum_of_those_that_stayed(self) -> None:
        assert judge(uploaded(), missing(), left(), left(), now=DEADLINE) == Aggregate()


def unseen(name: str = "silent") -> Participant:
    return Participant(name, active=True, uploaded=False, seen=False)


class TestFirstContact:
    """Before a quorum of the participants has been seen there is no time to upload that could pass."""

    @staticmethod
    def judge(*clients: Participant, now: float = OPENED) -> Waiting | StartClock | Aggregate | Fail:
        return judge_round(RoundSnapshot(1, OPENED, DEADLINE, clients, clock_started=False), RULES, now)

    def test_is_waited_for(self) -> None:
        verdict = self.judge(missing("north"), unseen("south"), unseen("east"), unseen("west"))
        what = "1 of 4 clients to connect"
        assert verdict == Waiting(what, OPENED, DEADLINE, ("south", "east", "west"))

    def test_of_a_quorum_starts_the_clock(self) -> None:
        assert self.judge(missing(), missing(), unseen(), unseen()) == StartClock()
        assert self.judge(missing(), uploaded(), unseen(), unseen()) == StartClock()

    def test_of_those_that_left_is_not_waited_for(self) -> None:
        assert self.judge(missing(), unseen(), left(), left()) == StartClock()

    def test_is_not_needed_where_everybody_has_uploaded(self) -> None:
        assert self.judge(uploaded(), left()) == Aggregate()

    def test_is_not_waited_for_forever(self) -> None:
        verdict = self.judge(missing(), unseen("a"), unseen("b"), unseen("c"), now=DEADLINE)
        assert verdict == Fail("only 1 of 4 clients connected in time, 2 are needed", "not seen: a, b, c")

    @given(rounds, times, quorums, st.lists(st.booleans(), min_size=12, max_size=12))
    def test_is_waited_for_or_judged_within_the_bound(
        self, members: list[Participant], now: float, quorum: float, seen: list[bool]
    ) -> None:
        clients = tuple(replace(client, seen=flag) for client, flag in zip(members, seen, strict=False))
        snapshot = RoundSnapshot(1, OPENED, DEADLINE, clients, clock_started=False)
        verdict = judge_round(snapshot, RoundsPlan(quorum=quorum), now)
        if isinstance(verdict, Waiting):
            assert now < DEADLINE
            assert verdict.until == DEADLINE


class TestArrivingUpload:
    """Bytes that still come at the deadline are waited for, within limits."""

    def test_is_waited_for_even_when_there_is_a_quorum(self) -> None:
        verdict = judge(uploaded(), missing("slow", last_byte_at=DEADLINE - 1), now=DEADLINE)
        what = "1 of 2 clients that still upload past the deadline"
        assert verdict == Waiting(what, OPENED, GRACE_ENDS, ("slow",))

    def test_names_only_what_arrives(self) -> None:
        verdict = judge(missing("absent"), missing("slow", last_byte_at=DEADLINE), now=DEADLINE + 1)
        assert isinstance(verdict, Waiting)
        assert verdict.names == ("slow",)

    def test_is_torn_after_the_idle_limit(self) -> None:
        slow = missing(last_byte_at=DEADLINE)
        assert isinstance(judge(uploaded(), slow, now=math.nextafter(DEADLINE + 60, 0)), Waiting)
        assert judge(uploaded(), slow, now=DEADLINE + 60) == Aggregate()

    def test_is_no_longer_waited_for_when_the_grace_ends(self) -> None:
        slow = missing(last_byte_at=GRACE_ENDS)
        assert isinstance(judge(uploaded(), slow, now=math.nextafter(GRACE_ENDS, 0)), Waiting)
        assert judge(uploaded(), slow, now=GRACE_ENDS) == Aggregate()

    def test_of_a_client_that_left_is_not_waited_for(self) -> None:
        gone = Participant("gone", active=False, uploaded=False, last_byte_at=DEADLINE)
        assert judge(uploaded(), gone, now=DEADLINE) == Aggregate()

    def test_gets_no_grace_where_the_plan_gives_none(self) -> None:
        rules = RoundsPlan(quorum=0.5, upload_grace_s=0)
        assert judge(uploaded(), missing(last_byte_at=DEADLINE), now=DEADLINE, rules=rules) == Aggregate()


ABSENT = RoundsPlan(deadline_s=600, quorum=0.5, absent_after_s=200)


def silent(name: str = "dead", *, heard_at: float = OPENED, seen: bool = True, reports: bool = True) -> Participant:
    return Participant(name, active=True, uploaded=False, seen=seen, heard_at=heard_at, reports=reports)


class TestAbsence:
    """A client that has not been heard from for a stated time is not waited for while there is a quorum."""

    def test_ends_the_wait_once_all_others_have_uploaded(self) -> None:
        clients = uploaded(), uploaded(), silent()
        verdict = judge(*clients, now=math.nextafter(OPENED + 200, 0), rules=ABSENT)
        assert verdict == Waiting("1 of 3 clients", OPENED, DEADLINE, ("dead",), look_at=OPENED + 200)
        assert judge(*clients, now=OPENED + 200, rules=ABSENT) == Aggregate()

    def test_does_not_end_it_while_a_present_client_trains(self) -> None:
        training = silent("slow", heard_at=OPENED + 290)
        verdict = judge(uploaded(), uploaded(), training, silent(), now=OPENED + 300, rules=ABSENT)
        what = "2 of 4 clients, 1 of them absent"
        assert verdict == Waiting(what, OPENED, DEADLINE, ("slow", "dead"), look_at=OPENED + 490)

    def test_does_not_lower_the_quorum(self) -> None:
        verdict = judge(uploaded(), silent("a"), silent("b"), now=OPENED + 300, rules=ABSENT)
        assert isinstance(verdict, Waiting)
        assert verdict.look_at is None, "before another upload time alone changes nothing"

    def test_of_an_agent_that_cannot_report_is_not_known_while_it_may_be_training(self) -> None:
        older = silent("older", reports=False)
        verdict = judge(uploaded(), older, now=OPENED + 300, rules=ABSENT)
        assert verdict == Waiting("1 of 2 clients", OPENED, DEADLINE, ("older",), look_at=OPENED + 500)
        assert isinstance(judge(uploaded(), older, now=DEADLINE - 1, rules=ABSENT), Waiting)
        assert judge(uploaded(), older, now=DEADLINE, rules=ABSENT) == Aggregate()
        unseen_older = silent("older", reports=False, seen=False)
        assert judge(uploaded(), unseen_older, now=OPENED + 200, rules=ABSENT) == Aggregate()

    def test_is_over_when_bytes_arrive(self) -> None:
        uploading = replace(silent(), last_byte_at=OPENED + 250)
        assert isinstance(judge(uploaded(), uploading, now=OPENED + 300, rules=ABSENT), Waiting)

    @given(rounds, times, quorums, st.lists(st.floats(OPENED - 500, DEADLINE), min_size=12, max_size=12))
    def test_only_ever_ends_a_round_earlier_and_as_its_deadline_would(
        self, members: list[Participant], now: float, quorum: float, heard: list[float]
    ) -> None:
        rules = ABSENT.model_copy(update={"quorum": quorum, "upload_grace_s": 0.0})
        clients = [replace(client, heard_at=at) for client, at in zip(members, heard, strict=False)]
        verdict, patient = judge(*clients, now=now, rules=rules), judge(*members, now=now, rules=rules)
        if type(verdict) is not type(patient):
            assert (verdict, type(patient)) == (Aggregate(), Waiting)
            assert judge(*members, now=DEADLINE, rules=rules) == Aggregate()
        if isinstance(verdict, Waiting) and verdict.look_at is not None:
            assert now < verdict.look_at < DEADLINE
            if verdict.look_at < now + rules.absent_after_s:
                assert judge(*clients, now=verdict.look_at, rules=rules) == Aggregate()


class TestReasonsForMissing:
    @pytest.mark.parametrize(
        ("signs", "reason"),
        [
            (LastSigns("left", 0, 0, True, ""), "left"),
            (LastSigns("revoked", 0, 9e9, True, "training round 1", ("Full.",)), "revoked"),
            (LastSigns("active", 0, 30, True, "training round 1"), "seen, last reported: training round 1"),
            (
                LastSigns("active", 0, 3600, True, "training round 1"),
                "not seen since 1970-01-01 00:00 UTC; last reported: training round 1",
            ),
            (
                LastSigns("active", 0, 30, True, "waiting for work", ("Some images cannot be read.",)),
                "reported: Some images cannot be read.",
            ),
            (
                LastSigns("active", 0, 3600, True, "waiting for work", ("Some images cannot be read.",)),
                "reported: Some images cannot be read.; not seen since 1970-01-01 00:00 UTC",
            ),
            (
                LastSigns("active", 60, 30, False, ""),
                "last seen 1970-01-01 00:01 UTC; its agent does not report what it does",
            ),
        ],
    )
    def test_say_what_is_known(self, signs: LastSigns, reason: str) -> None:
        assert explain_missing(signs) == reason


class TestDefaultQuorum:
    @pytest.mark.parametrize(("total", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (10, 7)])
    def test_does_without_one_site_of_three(self, total: int, needed: int) -> None:
        late = [missing()] * (total - needed)
        assert judge(*[uploaded()] * needed, *late, now=DEADLINE, rules=RoundsPlan()) == Aggregate()
        verdict = judge(*[uploaded()] * (needed - 1), *late, missing(), now=DEADLINE, rules=RoundsPlan())
        assert isinstance(verdict, Fail)


class TestEveryRound:
    @given(rounds, times, quorums)
    def test_waits_before_the_deadline_exactly_while_somebody_is_missing(
        self, members: list[Participant], now: float, quorum: float
    ) -> None:
        verdict = judge(*members, now=now, rules=RoundsPlan(quorum=quorum, upload_grace_s=300))
        if not any(client.active and not client.uploaded for client in members):
            assert isinstance(verdict, Aggregate) == any(client.uploaded for client in members)
        elif now < DEADLINE:
            assert isinstance(verdict, Waiting)

    @given(rounds, st.floats(GRACE_ENDS, GRACE_ENDS + 1e6), quorums)
    def test_ends_when_the_grace_does(self, members: list[Participant], now: float, quorum: float) -> None:
        rules = RoundsPlan(quorum=quorum, upload_grace_s=300)
        assert not isinstance(judge(*members, now=now, rules=rules), Waiting)

    @given(rounds, times, st.integers(0, 3))
    def test_does_not_see_clients_that_left_without_an_update(
        self, members: list[Participant], now: float, more: int
    ) -> None:
        assert judge(*members, *[left()] * more, now=now) == judge(*members, now=now)

    @given(rounds, times, st.randoms(use_true_random=False))
    def test_is_judged_alike_in_any_order(self, members: list[Participant], now: float, chance: Random) -> None:
        verdict = judge(*members, now=now)
        shuffled = judge(*chance.sample(members, len(members)), now=now)
        assert type(shuffled) is type(verdict)

    @given(rounds, times, quorums)
    def test_is_never_worse_off_for_one_more_update(
        self, members: list[Participant], now: float, quorum: float
    ) -> None:
        rules = RoundsPlan(quorum=quorum, upload_grace_s=300)
        before = judge(*members, now=now, rules=rules)
        for place, client in enumerate(members):
            if client.active and not client.uploaded:
                after = judge(*members[:place], uploaded(), *members[place + 1 :], now=now, rules=rules)
                assert not isinstance(after, Fail) or isinstance(before, Fail | Waiting)
                assert not isinstance(before, Aggregate) or isinstance(after, Aggregate)

    @given(rounds, times)
    def test_that_waits_says_until_when_and_that_is_ahead(self, members: list[Participant], now: float) -> None:
        verdict = judge(*members, now=now)
        if isinstance(verdict, Waiting):
            assert verdict.until is not None
            assert now < verdict.until <= GRACE_ENDS

    @given(st.integers(1, 2000).flatmap(lambda total: st.tuples(st.integers(1, total), st.just(total))))
    @example((1, 3))
    @example((7, 25))
    @example((2, 3))
    def test_needs_exactly_the_share_that_the_plan_asks_for(self, share: tuple[int, int]) -> None:
        """k of n written as the decimal fraction k/n means k, whatever the rounding of the fraction."""
        needed, total = share
        rules = RoundsPlan(quorum=needed / total)
        late = [missing()] * (total - needed)
        assert judge(*[uploaded()] * needed, *late, now=DEADLINE, rules=rules) == Aggregate()
        verdict = judge(*[uploaded()] * (needed - 1), *late, missing(), now=DEADLINE, rules=rules)
        assert isinstance(verdict, Fail)
        assert f"{needed} are needed" in verdict.reason


def judge_idle(
    rules: RoundsPlan,
    *,
    completed: int = 0,
    active: int = 5,
    absent: tuple[str, ...] = (),
    accuracy: float | None = None,
    stale: int = 0,
    now: float = 0,
) -> OpenRound | Finish | Waiting | Fail:
    return judge_federation(
        rules,
        completed_rounds=completed,
        active_clients=active,
        absent=absent,
        waiting_since=0,
        latest_accuracy=accuracy,
        stale_rounds=stale,
        now=now,
    )


class TestFederationBetweenRounds:
    def test_opens_the_next_round_with_enough_clients(self) -> None:
        assert judge_idle(RoundsPlan(min_clients=5)) == OpenRound()

    def test_waits_for_enough_clients(self) -> None:
        verdict = judge_idle(RoundsPlan(min_clients=5, join_deadline_s=100), active=4, now=99)
        assert verdict == Waiting("clients to join: 4 of at least 5", 0, 100)

    def test_gives_up_waiting_at_the_join_deadline(self) -> None:
        verdict = judge_idle(RoundsPlan(min_clients=5, join_deadline_s=100), active=4, now=100)
        assert verdict == Fail("only 4 of 5 clients had joined when the time to join was over")

    def test_waits_until_enough_are_present(self) -> None:
        rules = RoundsPlan(min_clients=4, join_deadline_s=1000, absent_after_s=200)
        assert judge_idle(rules, absent=("north",)) == OpenRound()
        verdict = judge_idle(rules, absent=("south", "north"), now=50)
        what = "clients to connect: 3 of at least 4 are present"
        assert verdict == Waiting(what, 0, 1000, ("north", "south"), look_at=250)
        assert describe(verdict, 50) == f"waiting for {what}; deadline in 16 min", "clients learn no names"

    def test_gives_up_waiting_for_absent_ones_at_the_join_deadline(self) -> None:
        rules = RoundsPlan(min_clients=4, join_deadline_s=100)
        verdict = judge_idle(rules, absent=("south", "north"), now=100)
        reason = "only 3 of at least 4 clients were present when the time to connect was over"
        assert verdict == Fail(reason, "absent: north, south")

    def test_has_no_join_deadline_once_enough_have_joined(self) -> None:
        assert judge_idle(RoundsPlan(min_clients=5, join_deadline_s=100), now=1e9) == OpenRound()

    def test_finishes_after_the_last_round(self) -> None:
        assert judge_idle(RoundsPlan(count=3), completed=2) == OpenRound()
        assert judge_idle(RoundsPlan(count=3), completed=3) == Finish("all 3 rounds are done")

    def test_finishes_at_the_target(self) -> None:
        rules = RoundsPlan(target_accuracy=0.9)
        assert judge_idle(rules, accuracy=None) == OpenRound()
        assert judge_idle(rules, accuracy=0.8999) == OpenRound()
        assert judge_idle(rules, accuracy=0.9) == Finish("the pooled accuracy 0.9000 reached the target 0.9")

    def test_finishes_when_patience_is_over(self) -> None:
        rules = RoundsPlan(patience=3)
        assert judge_idle(rules, stale=2) == OpenRound()
        assert judge_idle(rules, stale=3) == Finish("the accuracy has not improved for 3 rounds")

    def test_goes_on_to_the_end_without_target_and_patience(self) -> None:
        assert judge_idle(RoundsPlan(), accuracy=1.0, stale=50) == OpenRound()

    @given(st.integers(0, 9), st.integers(0, 9), st.none() | st.floats(0, 1), st.integers(0, 9), st.floats(0, 200))
    def test_that_has_ended_does_not_wait_for_clients(
        self, completed: int, active: int, accuracy: float | None, stale: int, now: float
    ) -> None:
        rules = RoundsPlan(count=5, min_clients=5, join_deadline_s=100, target_accuracy=0.5, patience=5)
        verdict = judge_idle(rules, completed=completed, active=active, accuracy=accuracy, stale=stale, now=now)
        ended = completed >= 5 or (accuracy is not None and accuracy >= 0.5) or stale >= 5
        assert isinstance(verdict, Finish) == ended
        if not ended:
            assert isinstance(verdict, OpenRound) == (active >= 5)
            assert isinstance(verdict, Fail) == (active < 5 and now >= 100)


class TestDescription:
    def test_says_what_for_and_until_when(self) -> None:
        waiting = Waiting("2 of 5 clients", since=0, until=480, names=("north", "south"))
        assert describe(waiting, now=0) == "waiting for 2 of 5 clients; deadline in 8 min"
        for_operator = describe(waiting, now=0, for_operator=True)
        assert for_operator == "waiting for 2 of 5 clients: north, south; deadline in 8 min"

    def test_names_five_of_many(self) -> None:
        words = describe(Waiting("7 of 7 clients", 0, None, CITIES), now=0, for_operator=True)
        assert words == "waiting for 7 of 7 clients: north, south, east, west, centre …"

    def test_says_nothing_of_a_deadline_where_there_is_none(self) -> None:
        assert (
            describe(Waiting("the operator to resume it", 0, None), now=50) == "waiting for the operator to resume it"
        )

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [
            (-5, "0 s"),
            (0, "0 s"),
            (0.2, "1 s"),
            (119, "119 s"),
            (120, "2 min"),
            (121, "3 min"),
            (2 * 3600 - 1, "120 min"),
            (2 * 3600, "2 h"),
            (48 * 3600 - 1, "48 h"),
            (48 * 3600, "2 days"),
            (49 * 3600, "3 days"),
        ],
    )
    def test_rounds_the_time_left_up(self, seconds: float, words: str) -> None:
        assert describe(Waiting("it", 0, 1000 + seconds), now=1000) == f"waiting for it; deadline in {words}"

    @given(rounds, times)
    def test_is_one_line(self, members: list[Participant], now: float) -> None:
        verdict = judge(*members, now=now)
        if isinstance(verdict, Waiting):
            words = describe(verdict, now)
            assert words.startswith("waiting for ")
            assert "; deadline in " in words
            assert "\n" not in words
            assert not any(city in words for city in CITIES)
