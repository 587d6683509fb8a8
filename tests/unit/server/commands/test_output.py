"""What `client list` and `federation show` report about agents and missing updates."""

import pytest

from server.commands.output import activity_cells, images_cell, missing_cell, state_cell
from shared.contract.messages import ClientView, MissingView, RoundView, TroubleReport

CLIENT = ClientView(
    id="c", name="north", state="active", federation="pets", class_counts={}, agent_version="", device="",
    joined_at=0, last_seen_at=1000,
)  # fmt: skip
ROUND = RoundView(
    id=1, number=1, state="done", facts={}, participants=9, updates=2, opened_at=0, deadline_at=None, closed_at=1,
    uploads=[], evaluation=None, client_evaluations={},
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "now", "cells"),
    [
        ({}, 1060, ("not reported", "–", "60 s ago")),
        ({"activity": "training", "activity_detail": "training round 3"}, 990, ("training round 3", "–", "0 s ago")),
        ({"state": "left", "activity": "waiting"}, 1000 + 3 * 86400, ("–", "–", "3 days ago")),
        (
            {"activity": "waiting", "troubles": [TroubleReport(kind="data", message="Gone.")] * 2},
            1000 + 600,
            ("waiting", "Gone. Gone.", "10 min ago"),
        ),
    ],
)
def test_a_client_shows_what_its_agent_reported(changes: dict[str, object], now: float, cells: tuple[str, ...]) -> None:
    assert activity_cells(CLIENT.model_copy(update=changes), now) == cells


def test_a_silent_client_is_absent() -> None:
    assert [state_cell(CLIENT, 1000 + silent_s, 120) for silent_s in (119, 120)] == ["active", "absent"]
    assert state_cell(CLIENT.model_copy(update={"state": "left"}), 2000, 120) == "left"


def test_a_round_lists_only_a_few_of_many_missing_clients() -> None:
    missing = [MissingView(client=f"site-{number}", reason="left") for number in range(7)]
    assert missing_cell(ROUND) == "–"
    lines = missing_cell(ROUND.model_copy(update={"missing": missing})).splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("site-0: left", 6, "and 2 more")


def test_an_open_round_says_how_many_have_not_uploaded_yet() -> None:
    """It records who is missing, and why, only when it closes."""
    assert missing_cell(ROUND.model_copy(update={"state": "open"})) == "7 have not uploaded yet"
    assert missing_cell(ROUND.model_copy(update={"state": "open", "updates": 9})) == "–"


def test_a_client_that_withholds_its_class_counts_has_no_number_of_images() -> None:
    assert images_cell(CLIENT) == "withheld"
    assert images_cell(CLIENT.model_copy(update={"class_counts": {"cat": 3, "dog": 0}})) == "3"
