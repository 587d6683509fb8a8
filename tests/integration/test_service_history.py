"""History read in pages: complete, in order, and with a constant number of queries."""

import csv
import io

import pytest
from sqlalchemy import select, update
from support.desk import OPERATOR, Desk, fedavg_plan, measured
from support.many_rows import copy_round, statements

from server.core.errors import NotFound, TooMany
from server.service import clients
from server.service.audit import CHANGES_PER_HOUR
from server.service.context import Identity
from server.service.measurements import evaluations, history, reports
from server.service.measurements.metrics_csv import COLUMNS, metrics_csv
from server.store.database import Database
from server.store.tables import AuditEntry, Evaluation

COPIES = 30


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, fedavg_plan(min_clients=2))


@pytest.fixture
def sites(desk: Desk) -> list[Identity]:
    """Two sites, with one finished and measured round and one open round."""
    sites = [desk.join("north"), desk.join("south")]
    desk.run_round({sites[0]: 1, sites[1]: 2})
    for site in sites:
        evaluations.submit(desk.ctx, site, 1, measured(7))
    return sites


def rows_of(desk: Desk, only_client: str | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO("".join(metrics_csv(desk.ctx, desk.name, only_client)))))


def test_queries_do_not_grow_with_the_number_of_rounds(desk: Desk, sites: list[Identity]) -> None:
    def queries() -> list[int]:
        numbers = []
        for client in (None, sites[0].client_id):
            with statements(desk.db) as seen:
                reports.rounds(desk.ctx, desk.name, client, 0, 1000)
            numbers.append(len(seen))
            with statements(desk.db) as seen:
                rows_of(desk, client)
            numbers.append(len(seen))
        return numbers

    few = queries()
    copy_round(desk.db, 1, COPIES)
    assert queries() == few


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_pages_make_up_the_whole(desk: Desk, sites: list[Identity], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_round(desk.db, 1, COPIES)
    monkeypatch.setattr(history, "_PAGE_ROWS", rows)
    numbers = [round_.number for round_ in desk.rounds()]
    assert [view.number for view in reports.rounds(desk.ctx, desk.name, None, 0, 1000)] == numbers
    assert [view.number for view in reports.rounds(desk.ctx, desk.name, None, 1, 7)] == numbers[1:8]
    everything = rows_of(desk)
    assert [row["client"] for row in everything] == ["north", "south", "(all)"] * (COPIES + 1)
    assert {row["test_accuracy"] for row in everything} == {"0.7"}
    assert rows_of(desk, sites[1].client_id) == [row for row in everything if row["client"] == "south"]


@pytest.mark.usefixtures("sites")
def test_a_page_does_not_read_the_rosters(desk: Desk) -> None:
    """A roster holds all clients' class counts: a megabyte with thousands of classes."""
    with statements(desk.db) as seen:
        rows_of(desk)
    assert not [statement for statement in seen if "roster" in statement]


def test_nothing_is_sent_for_a_federation_that_is_not_there(desk: Desk) -> None:
    for pages in (metrics_csv(desk.ctx, "cats", None), reports.round_pages(desk.ctx, "cats", None, 0, 10)):
        with pytest.raises(NotFound):
            next(pages)


def test_a_federation_without_rounds_has_an_empty_history(desk: Desk) -> None:
    assert list(reports.round_pages(desk.ctx, desk.name, None, 0, 10)) == []
    assert "".join(metrics_csv(desk.ctx, desk.name, None)).splitlines() == [",".join(COLUMNS)]


def test_an_impossible_measurement_of_an_older_release_hides_only_itself(desk: Desk, sites: list[Identity]) -> None:
    with desk.db.write() as session:
        result = '{"samples": -5, "correct": 9, "loss_sum": 1.0}'
        session.execute(update(Evaluation).where(Evaluation.client_id == sites[0].client_id).values(result=result))
    north, south, everybody = rows_of(desk)
    assert (north["samples"], north["test_samples"]) == ("10", "")
    assert south["test_samples"] == everybody["test_samples"] == "10"
    (first, _) = reports.rounds(desk.ctx, desk.name, None, 0, 10)
    assert first.client_evaluations.keys() == {"south"}


class TestChangesOfARecord:
    @staticmethod
    def changes(desk: Desk) -> int:
        with desk.db.read() as session:
            return len(session.execute(select(AuditEntry).where(AuditEntry.action == "client.update")).scalars().all())

    def test_the_same_counts_again_write_nothing(self, desk: Desk) -> None:
        north = desk.join("north", cat=3, dog=4)
        with statements(desk.db) as seen:
            for _ in range(100):
                view = clients.update_counts(desk.ctx, north, OPERATOR, {"dog": 4, "cat": 3})
        assert view.class_counts == {"cat": 3, "dog": 4}
        assert self.changes(desk) == 0
        assert not [statement for statement in seen if not statement.startswith("SELECT")]

    def test_changes_per_hour_are_limited(self, desk: Desk) -> None:
        north = desk.join("north")
        for number in range(CHANGES_PER_HOUR):
            clients.update_counts(desk.ctx, north, OPERATOR, {"cat": number + 1})
        with pytest.raises(TooMany) as caught:
            clients.update_counts(desk.ctx, north, OPERATOR, {"cat": 999})
        assert caught.value.code == "too-many-changes"
        assert self.changes(desk) == CHANGES_PER_HOUR
        desk.clock.advance(3601)
        assert clients.update_counts(desk.ctx, north, OPERATOR, {"cat": 999}).class_counts["cat"] == 999
