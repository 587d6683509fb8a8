from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from client_agent.serving.candidates import Base, fixed_candidates
from lab.datasets.site_folders import SiteFolder
from lab.demo.results import Findings, results_table, show_results
from shared.contract.measurements import PairedCounts
from shared.learning.verdict import reach_verdict

BASES = (Base.GLOBAL, Base.OFFSET, Base.ADAPTED, Base.ALONE)
SITE = SiteFolder("site-001", Path("x"), ("1", "2", "6", "9"), 50, "inverted")


def findings(only_served: int, only_alone: int, candidate: str = "blend", *, outcome: str = "over") -> Findings:
    """Return what an agent's /info would hold for 60 test images, 40 of which both models get right."""
    neither = 20 - only_served - only_alone
    paired = PairedCounts(samples=60, both=40, only_served=only_served, only_alone=only_alone, neither=neither)
    verdict = reach_verdict(paired, candidate)
    info: dict[str, Any] = {
        "agent": {"outcome": outcome},
        "serving": {"candidate": candidate},
        "verdict": verdict.model_dump(),
        "scores": {
            "served": {"accuracy": verdict.served_accuracy, "samples": 60},
            "alone": {"accuracy": verdict.alone_accuracy, "samples": 60},
        },
    }
    return Findings(SITE, info)


@pytest.mark.parametrize(
    ("only_served", "only_alone", "candidate", "expected"),
    [
        (12, 1, "blend", "pays off +18.3"),
        (2, 1, "blend", "unclear +1.7"),
        (1, 2, "blend", "unclear −1.7"),
        (0, 12, "blend", "better alone"),
        (0, 0, "alone", "better alone"),
    ],
)
def test_verdict_in_a_few_words(only_served: int, only_alone: int, candidate: str, expected: str) -> None:
    assert findings(only_served, only_alone, candidate).verdict == expected


def test_site_that_has_not_finished_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    late = findings(12, 1, outcome="")
    assert late.verdict == "pays off +18.3 *"
    show_results(Console(), [late], None, "Joining pays off at none.")
    shown = capsys.readouterr().out
    assert "* site-001: not finished in time; the comparison flatters the federation." in shown
    assert shown.endswith("\n\nJoining pays off at none.\n")


def test_site_without_test_images_has_dashes() -> None:
    nothing = Findings(SITE, {"agent": {"outcome": "over"}, "serving": None, "verdict": None, "scores": None})
    row = [next(iter(column.cells)) for column in results_table([nothing], {"site-001": None}).columns]
    assert row == ["site-001", "1269", "inverted", "50", "–", "–", "–", "–", "–"]


@pytest.mark.parametrize(
    "candidate", [candidate.name for candidate in fixed_candidates(BASES, has_prior=True)] + ["blend"]
)
def test_table_is_whole_in_100_columns_and_in_a_pipe(candidate: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = findings(12, 1, candidate)
    for name in ("served", "alone"):
        one.info["scores"][name]["accuracy"] = 1.0
    table = results_table([one], {"site-001": 1.0})
    wide = Console(width=1000).measure(table).maximum
    assert wide <= 100
    show_results(Console(width=40), [one], {"site-001": 1.0}, "")
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("site-001"))
    assert row.rstrip().endswith(f"  {one.candidate}")
    assert [member.split("+")[0].strip() for member in one.candidate.split("&")] == [
        member.split("+")[0] for member in candidate.split(" & ")
    ]
