"""Sites that are dead, silent or in trouble: rounds continue without them and give the reason."""

import pytest
from sqlalchemy import select
from support.desk import OPERATOR, Desk, fedavg_plan
from support.many_rows import copy_federation, statements

from server.service import clients, deadlines, federations, heartbeats, tasks
from server.service.context import Identity
from server.service.heartbeats import Heartbeats
from server.service.measurements import reports
from server.store.database import Database
from server.store.tables import Client
from shared.contract.messages import MissingView, RoundView, StatusReport, TroubleReport

HALF_AN_HOUR = 1800.0
TRAINING = StatusReport(activity="training", detail="training round 1")


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, fedavg_plan(min_clients=2, quorum=0.66, deadline_s=6 * 3600), polling=False)


@pytest.fixture
def sites(desk: Desk) -> list[Identity]:
    federations.pause(desk.ctx, OPERATOR, desk.name)
    joined = [desk.join(name) for name in ("east", "north", "south")]
    federations.resume(desk.ctx, OPERATOR, desk.name)
    desk.poll(*joined)
    return joined


def report(desk: Desk, *who: Identity, says: StatusReport = TRAINING) -> None:
    """Send a report from the agents of these sites, and let the worker write it."""
    beats = Heartbeats()
    for site in who:
        beats.note_report(site.client_id, desk.clock(), says)
    beats.flush(desk.ctx)


def last_round(desk: Desk, only: Identity | None = None) -> RoundView:
    number = desk.rounds()[-1].number
    (found,) = reports.rounds(desk.ctx, desk.name, only.client_id if only else None, number - 1, 1)
    return found


def names(desk: Desk) -> set[str]:
    """Return the participants of the round under way."""
    return set((desk.view.waiting_for or "").partition(": ")[2].partition(";")[0].split(", "))


class TestDeadSite:
    def test_is_not_waited_for_when_the_others_have_uploaded(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, *sites)
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        desk.let_pass(HALF_AN_HOUR - 1)
        assert desk.round.waiting_for == "waiting for 1 of 3 clients: south; deadline in 6 h"
        desk.let_pass(1)
        assert desk.round.state == "aggregating"
        (missing,) = last_round(desk).missing
        assert missing.client == "south"
        assert missing.reason.startswith("not seen since 2023-11-14 22:13 UTC; last reported: training round 1")

    def test_is_waited_for_while_it_reports(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, *sites)
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        for _ in range(5):
            desk.let_pass(HALF_AN_HOUR - 1)
            assert desk.round.state == "open"
            report(desk, sites[2])
        desk.upload(sites[2], 3)
        assert desk.round.state == "aggregating"
        assert last_round(desk).missing == []

    def test_is_not_chosen_again_until_it_returns(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, *sites)
        desk.let_pass(HALF_AN_HOUR)
        report(desk, *sites[:2])
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        deadlines.enforce_deadlines(desk.ctx)
        desk.aggregate()
        assert (desk.round.number, desk.round.participants) == (2, 2)
        (missing,) = last_round(desk).missing
        assert missing.client == "south"
        assert missing.reason.startswith("not chosen: not seen since ")
        assert tasks.task(desk.ctx, sites[2]).action == "wait"
        report(desk, sites[2])
        assert desk.round.participants == 2, "it takes part with the next round"
        desk.run_round({sites[0]: 3, sites[1]: 4})
        assert (desk.round.number, desk.round.participants) == (3, 3)

    def test_of_an_older_agent_may_be_training_and_is_waited_for(self, desk: Desk, sites: list[Identity]) -> None:
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        desk.let_pass(6 * 3600 - 1)
        assert desk.round.state == "open"
        desk.upload(sites[2], 3)
        desk.poll(sites[0])
        desk.aggregate()
        assert (desk.round.number, desk.round.participants) == (2, 2), "an upload is a sign of life"

    def test_that_went_back_to_an_older_agent_is_waited_for_again(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, *sites)
        desk.poll(sites[2])
        assert clients.own_record(desk.ctx, sites[2]).status_at is None
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        desk.let_pass(2 * HALF_AN_HOUR)
        assert desk.round.state == "open"

    def test_counts_by_uptime_not_by_the_clock_on_the_wall(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, *sites)
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        desk.clock.jump(86400)
        desk.let_pass(1)
        assert desk.round.state == "open"

    def test_does_not_end_a_paused_round(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, *sites)
        desk.upload(sites[0], 1)
        federations.pause(desk.ctx, OPERATOR, desk.name)
        desk.let_pass(10 * HALF_AN_HOUR)
        assert desk.round.state == "open"


class TestTooFewPresent:
    @pytest.fixture
    def idle(self, desk: Desk, sites: list[Identity]) -> Desk:
        """Only one of at least two clients is left when the round ends."""
        report(desk, *sites)
        desk.wait(HALF_AN_HOUR)
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        deadlines.enforce_deadlines(desk.ctx)
        desk.wait(HALF_AN_HOUR)
        report(desk, sites[0])
        desk.aggregate()
        return desk

    def test_is_waited_for_and_said(self, idle: Desk) -> None:
        assert (idle.view.state, idle.view.round) == ("running", None)
        what = "waiting for clients to connect: 1 of at least 2 are present: north, south; deadline in 7 days"
        assert idle.view.waiting_for == what

    def test_ends_with_the_first_that_returns(self, idle: Desk, sites: list[Identity]) -> None:
        report(idle, sites[2])
        assert (idle.round.number, idle.round.participants) == (2, 2)
        assert names(idle) == {"east", "south"}

    def test_ends_although_the_process_died_after_it_had_written_the_sign(
        self, idle: Desk, sites: list[Identity], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(heartbeats, "advance_if_due", lambda *_: None)
            report(idle, sites[0], sites[2])
        assert idle.view.round is None
        idle.restart()
        idle.wait(HALF_AN_HOUR - 1)
        report(idle, sites[0], sites[2])
        idle.let_pass(1)
        assert idle.round.participants == 2

    def test_costs_nothing_to_look_at_while_agents_poll(self, idle: Desk, sites: list[Identity]) -> None:
        idle.wait(60)
        with statements(idle.db) as seen:
            report(idle, sites[0])
        assert not any("FROM models" in statement for statement in seen), seen


class TestReasons:
    def test_are_recorded_when_a_round_fails(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, sites[0])
        trouble = TroubleReport(kind="images", message="7 of 9 images cannot be read.")
        clients.revoke(desk.ctx, OPERATOR, desk.name, "south")
        desk.wait(6 * 3600 - 5)
        report(desk, sites[0])
        report(desk, sites[1], says=StatusReport(activity="waiting", detail="waiting for work", troubles=[trouble]))
        desk.let_pass(5)
        assert desk.view.state == "paused"
        assert last_round(desk).missing == [
            MissingView(client="east", reason="seen, last reported: training round 1"),
            MissingView(client="north", reason="reported: 7 of 9 images cannot be read."),
            MissingView(client="south", reason="revoked"),
        ]

    def test_are_for_the_operator_and_the_site_itself(self, desk: Desk, sites: list[Identity]) -> None:
        report(desk, *sites)
        desk.let_pass(6 * 3600)
        assert [one.client for one in last_round(desk).missing] == ["east", "north", "south"]
        assert [one.client for one in last_round(desk, sites[1]).missing] == ["north"]


def test_a_report_that_another_process_has_had_since_counts(clean_db: Database) -> None:
    """The agent sent its last report to the second process, then asked the first one for work."""
    desk = Desk(clean_db, fedavg_plan())
    north = desk.join("north")
    first, second = Heartbeats(), Heartbeats()
    first.note_report(north.client_id, desk.clock(), StatusReport(activity="measuring", detail="measuring model 1"))
    desk.clock.advance(1)
    second.note_report(north.client_id, desk.clock(), TRAINING)
    desk.clock.advance(1)
    first.note(north.client_id, desk.clock())
    for beats in (second, first):
        beats.flush(desk.ctx)
    view = clients.own_record(desk.ctx, north)
    assert (view.activity, view.status_at, view.last_seen_at) == ("training", desk.clock() - 1, desk.clock())


def test_many_reports_cost_one_transaction_and_never_advance_a_federation(clean_db: Database) -> None:
    desk = Desk(clean_db, fedavg_plan())
    north = desk.join("north")
    copy_federation(clean_db, 999)
    beats = Heartbeats()
    with clean_db.read() as session:
        client_ids = list(session.execute(select(Client.id)).scalars())
    for client_id in client_ids:
        beats.note_report(client_id, desk.clock(), TRAINING)
    with statements(clean_db) as seen:
        beats.flush(desk.ctx)
    updates = [statement for statement in seen if statement.startswith("UPDATE clients")]
    assert len(updates) == 2  # for all of them together
    assert len(seen) - len(updates) <= 3, [line for line in seen if not line.startswith("UPDATE clients")]
    assert clients.own_record(desk.ctx, north).activity_detail == "training round 1"


class TestHeartbeats:
    def test_are_written_together_and_never_go_back(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        north, south = desk.join("north"), desk.join("south")
        joined = desk.clock.now
        beats = Heartbeats()
        beats.note(north.client_id, joined + 5)
        beats.note(south.client_id, joined - 5)
        beats.flush(desk.ctx)
        assert clients.own_record(desk.ctx, north).last_seen_at == joined + 5
        assert clients.own_record(desk.ctx, south).last_seen_at == joined
        assert beats.seen == {}
