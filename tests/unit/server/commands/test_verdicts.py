"""The section of `federation show` on whether joining paid off."""

import io

from rich.console import Console
from rich.table import Table

from server.commands.output import federation_lines
from server.commands.verdicts import verdict_section
from shared.contract.measurements import PairedCounts
from shared.contract.messages import FederationView, SiteVerdict, VerdictSummary
from shared.learning.verdict import reach_verdict

VIEW = FederationView(
    name="pets", state="finished", reason="all 60 rounds are done", state_since=0, waiting_for=None, waiting_since=None,
    waiting_until=None, method="distrans", rounds_done=60, rounds_total=60, round=None, latest_model=60, clients=3,
    dh=0.5, best_accuracy=0.9, best_model=59,
)  # fmt: skip


def site(name: str, both: int, only_served: int, only_alone: int, neither: int) -> SiteVerdict:
    samples = both + only_served + only_alone + neither
    paired = PairedCounts(samples=samples, both=both, only_served=only_served, only_alone=only_alone, neither=neither)
    return SiteVerdict(client=name, model=60, verdict=reach_verdict(paired))


def printed(table: Table) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=250).print(table)
    rows = [line for line in text.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_has_one_row_per_site_and_a_closing_sentence() -> None:
    summary = VerdictSummary(pays_off=1, no_difference=1, better_alone=0, not_shared=1, sentence="That was worth it.")
    verdicts = [site("north", 300, 27, 10, 75), site("south", 0, 0, 0, 0)]
    table, closing = verdict_section(VIEW.model_copy(update={"verdicts": verdicts, "verdict_summary": summary}))
    assert isinstance(table, Table)
    assert printed(table) == [
        [
            "north",
            "60",
            "79.4% (75.2 to 83.0)",
            "75.2% (70.9 to 79.2)",
            "+4.1 (1.2 to 7.0)",
            "Joining pays off: +4.1 points (1.2 to 7.0) on 412 test images",
        ],
        ["south", "60", "–", "–", "–", "No difference can be shown without test images"],
    ]
    assert closing == "That was worth it."


def test_is_left_out_if_no_site_shares_its_verdict() -> None:
    assert verdict_section(VIEW) == []


def test_a_federation_that_has_not_converged_says_how_many_more_rounds_would_help() -> None:
    assert federation_lines(VIEW)[1:] == ["  all 60 rounds are done"]
    lines = federation_lines(VIEW.model_copy(update={"more_rounds": 20}))
    assert lines[1:] == ["  all 60 rounds are done", "  not converged; about 20 more rounds would help"]
