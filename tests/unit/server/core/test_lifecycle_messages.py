import pytest

from server.core.lifecycle import (
    LastContact,
    Waiting,
    describe_waiting,
    explain_missing,
)

CITIES = ("north", "south", "east", "west", "centre", "coast", "hills")


class TestReasonsForMissing:
    @pytest.mark.parametrize(
        ("signs", "reason"),
        [
            (LastContact("left", 0, 0, True, ""), "left"),
            (LastContact("revoked", 0, 9e9, True, "training round 1", ("Full.",)), "revoked"),
            (LastContact("active", 0, 30, True, "training round 1"), "seen, last reported: training round 1"),
            (
                LastContact("active", 0, 3600, True, "training round 1"),
                "not seen since 1970-01-01 00:00 UTC; last reported: training round 1",
            ),
            (
                LastContact("active", 0, 30, True, "waiting for work", ("Some images cannot be read.",)),
                "reported: Some images cannot be read.",
            ),
            (
                LastContact("active", 0, 3600, True, "waiting for work", ("Some images cannot be read.",)),
                "reported: Some images cannot be read.; not seen since 1970-01-01 00:00 UTC",
            ),
            (
                LastContact("active", 60, 30, False, ""),
                "last seen 1970-01-01 00:01 UTC; its agent does not report its activity",
            ),
        ],
    )
    def test_name_state_last_report_and_last_contact(self, signs: LastContact, reason: str) -> None:
        assert explain_missing(signs) == reason


class TestDescription:
    def test_says_what_for_and_until_when(self) -> None:
        waiting = Waiting("2 of 5 clients", until=480, names=("north", "south"))
        assert describe_waiting(waiting, now=0) == "waiting for 2 of 5 clients; deadline in 8 min"
        for_operator = describe_waiting(waiting, now=0, for_operator=True)
        assert for_operator == "waiting for 2 of 5 clients: north, south; deadline in 8 min"

    def test_names_five_of_many(self) -> None:
        words = describe_waiting(Waiting("7 of 7 clients", None, CITIES), now=0, for_operator=True)
        assert words == "waiting for 7 of 7 clients: north, south, east, west, centre …"

    def test_says_nothing_of_a_deadline_where_there_is_none(self) -> None:
        assert (
            describe_waiting(Waiting("the operator to resume it", None), now=50)
            == "waiting for the operator to resume it"
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
        assert describe_waiting(Waiting("it", 1000 + seconds), now=1000) == f"waiting for it; deadline in {words}"
