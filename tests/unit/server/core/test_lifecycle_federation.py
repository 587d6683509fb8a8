from hypothesis import given
from hypothesis import strategies as st

from server.core.lifecycle import (
    Fail,
    Finish,
    OpenRound,
    Waiting,
    decide_federation,
    describe_waiting,
)
from shared.contract.plan import RoundsPlan


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
    return decide_federation(
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
        decision = judge_idle(RoundsPlan(min_clients=5, join_deadline_s=100), active=4, now=99)
        assert decision == Waiting("clients to join: 4 of at least 5", 100)

    def test_gives_up_waiting_at_the_join_deadline(self) -> None:
        decision = judge_idle(RoundsPlan(min_clients=5, join_deadline_s=100), active=4, now=100)
        assert decision == Fail("only 4 of 5 clients joined before the join deadline")

    def test_waits_until_enough_are_present(self) -> None:
        rules = RoundsPlan(min_clients=4, join_deadline_s=1000, absent_after_s=200)
        assert judge_idle(rules, absent=("north",)) == OpenRound()
        decision = judge_idle(rules, absent=("south", "north"), now=50)
        what = "clients to connect: 3 of at least 4 are present"
        assert decision == Waiting(what, 1000, ("north", "south"), recheck_at=250)
        assert describe_waiting(decision, 50) == f"waiting for {what}; deadline in 16 min", "clients learn no names"

    def test_gives_up_waiting_for_absent_ones_at_the_join_deadline(self) -> None:
        rules = RoundsPlan(min_clients=4, join_deadline_s=100)
        decision = judge_idle(rules, absent=("south", "north"), now=100)
        reason = "only 3 of at least 4 clients were present at the join deadline"
        assert decision == Fail(reason, "absent: north, south")

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
        decision = judge_idle(rules, completed=completed, active=active, accuracy=accuracy, stale=stale, now=now)
        ended = completed >= 5 or (accuracy is not None and accuracy >= 0.5) or stale >= 5
        assert isinstance(decision, Finish) == ended
        if not ended:
            assert isinstance(decision, OpenRound) == (active >= 5)
            assert isinstance(decision, Fail) == (active < 5 and now >= 100)
