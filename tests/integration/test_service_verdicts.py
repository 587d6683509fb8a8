"""Verdicts that sites share: who sees them, which ones count, and what the summary says."""

import csv
import io

import pytest
from support.desk import OPERATOR, Desk, fedavg_plan, measured, refused

from server.core.errors import InvalidInput
from server.service import clients, federations
from server.service.context import Identity
from server.service.measurements import evaluations
from server.service.measurements.metrics_csv import metrics_csv
from server.service.measurements.verdicts import summarize
from server.store.database import Database
from shared.contract.measurements import EvaluationReport, PairedCounts
from shared.contract.messages import FederationView, SiteVerdict
from shared.learning.verdict import reach_verdict

UNCLEAR = PairedCounts(samples=100, both=60, only_served=9, only_alone=8, neither=23)
BETTER = PairedCounts(samples=100, both=60, only_served=20, only_alone=5, neither=15)
WORSE = PairedCounts(samples=100, both=60, only_served=5, only_alone=20, neither=15)


def submit(desk: Desk, who: Identity, model: int, paired: PairedCounts | None, candidate: str | None = None) -> None:
    result = EvaluationReport(samples=100, correct=70, loss_sum=1.0, paired=paired, candidate=candidate)
    evaluations.submit(desk.ctx, who, model, result)


def shown(view: FederationView) -> list[tuple[str, int, str]]:
    return [(one.client, one.model, one.verdict.outcome) for one in view.verdicts]


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, fedavg_plan(min_clients=2))


@pytest.fixture
def sites(desk: Desk) -> list[Identity]:
    """Three sites, each with enough images for an evaluation, and one finished round."""
    found = [desk.join(name, cat=50, dog=50) for name in ("west", "north", "south")]
    desk.run_round({who: seed for seed, who in enumerate(found[:2])})  # round 1 opened before south joined
    return found


class TestVerdicts:
    def test_are_of_the_newest_model_each_site_evaluated(self, desk: Desk, sites: list[Identity]) -> None:
        west, north, south = sites
        assert (desk.view.verdicts, desk.view.verdict_summary) == ([], None)
        submit(desk, west, 0, WORSE)
        submit(desk, west, 1, UNCLEAR)
        submit(desk, north, 0, BETTER, "offset+prior")
        submit(desk, south, 1, None)
        view = desk.view
        assert shown(view) == [("north", 0, "pays-off"), ("west", 1, "no-difference")]
        assert view.verdicts[0].verdict == reach_verdict(BETTER, "offset+prior")
        assert view.verdict_summary is not None
        assert view.verdict_summary.sentence == (
            "Joining pays off at 1 of 2 sites; no difference can be shown at 1; 1 more does not share its verdict."
        )

    def test_end_when_a_site_stops_sharing(self, desk: Desk, sites: list[Identity]) -> None:
        submit(desk, sites[0], 0, BETTER)
        submit(desk, sites[0], 1, None)
        assert (desk.view.verdicts, desk.view.verdict_summary) == ([], None)

    def test_of_other_sites_are_not_for_clients(self, desk: Desk, sites: list[Identity]) -> None:
        west, north, south = sites
        submit(desk, west, 0, WORSE)
        submit(desk, west, 1, BETTER)
        submit(desk, north, 1, UNCLEAR)
        for who, expected in ((west, [("west", 1, "pays-off")]), (north, [("north", 1, "no-difference")]), (south, [])):
            view = federations.show(desk.ctx, desk.name, who.client_id)
            assert (shown(view), view.verdict_summary) == (expected, None)
        (listed,) = federations.list_all(desk.ctx)
        assert listed.verdicts == [], "only asked for one by one"

    def test_of_sites_that_left_before_the_end_do_not_count(self, desk: Desk, sites: list[Identity]) -> None:
        for who in sites:
            submit(desk, who, 1, BETTER)
        clients.leave(desk.ctx, sites[0], OPERATOR)
        clients.revoke(desk.ctx, OPERATOR, desk.name, "north")
        assert shown(desk.view) == [("south", 1, "pays-off")]
        assert desk.view.verdict_summary is not None
        assert desk.view.verdict_summary.not_shared == 0

    def test_cannot_cover_more_images_than_a_site_registered(self, desk: Desk) -> None:
        north = desk.join("north", cat=5, dog=5)
        refused(
            InvalidInput,
            "too-many-samples",
            lambda: evaluations.submit(desk.ctx, north, 0, measured(1, paired=BETTER)),
        )

    def test_do_not_change_what_is_pooled(self, desk: Desk, sites: list[Identity]) -> None:
        submit(desk, sites[0], 1, BETTER)
        submit(desk, sites[1], 1, None)
        rows = list(csv.DictReader(io.StringIO("".join(metrics_csv(desk.ctx, desk.name, None)))))
        first = {row["client"]: row for row in rows if row["round"] == "1"}
        assert (first["(all)"]["test_samples"], first["(all)"]["test_accuracy"]) == ("200", "0.7")
        paired = ["paired_samples", "paired_both", "paired_only_served", "paired_only_alone", "paired_neither"]
        assert list(rows[0])[-5:] == paired
        assert [first["west"][name] for name in paired] == ["100", "60", "20", "5", "15"]
        assert [first[client][name] for client in ("north", "(all)") for name in paired] == [""] * 10


@pytest.mark.parametrize(
    ("outcomes", "not_shared", "sentence"),
    [
        ([BETTER] * 3 + [UNCLEAR] * 2, 0, "Joining pays off at 3 of 5 sites; no difference can be shown at 2."),
        ([BETTER], 0, "Joining pays off at 1 of 1 site."),
        ([WORSE], 2, "Joining pays off at none of 1 site; 1 does better alone; 2 more do not share their verdict."),
        ([BETTER, WORSE, WORSE], 0, "Joining pays off at 1 of 3 sites; 2 do better alone."),
    ],
)
def test_summary_counts_the_outcomes(outcomes: list[PairedCounts], not_shared: int, sentence: str) -> None:
    verdicts = [SiteVerdict(client=str(n), model=1, verdict=reach_verdict(one)) for n, one in enumerate(outcomes)]
    found = summarize(verdicts, not_shared)
    assert found.sentence == sentence
    assert found.pays_off + found.no_difference + found.better_alone == len(outcomes)


def test_summary_adds_up_the_test_images_of_all_sites() -> None:
    """Three times the same counts: none shows a difference alone, together they do."""
    few = PairedCounts(samples=40, both=30, only_served=5, only_alone=1, neither=4)
    verdicts = [SiteVerdict(client=name, model=1, verdict=reach_verdict(few)) for name in "abc"]
    assert {one.verdict.outcome for one in verdicts} == {"no-difference"}
    assert summarize(verdicts, 0).together == "All 3 together: +10.0 points (3.1 to 16.6) on 120 test images."
    assert summarize(verdicts[:1], 0).together == ""
