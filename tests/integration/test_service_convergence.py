"""Whether `federation show` asks for more rounds."""

from support.desk import OPERATOR, Desk, fedavg_plan, measured

from server.service import federations, rollback
from server.service.context import Identity
from server.service.measurements import evaluations
from server.store.database import Database


def run(desk: Desk, site: Identity, models: range, rise: int = 5) -> None:
    """Run the rounds behind these models; each gets `rise` more images right than the one before it."""
    for number in models:
        desk.run_round({site: number})
        evaluations.submit(desk.ctx, site, number, measured(10 + rise * number, samples=100))


def federation(db: Database, rounds: int) -> tuple[Desk, Identity]:
    desk = Desk(db, fedavg_plan(count=rounds))
    return desk, desk.join("north", cat=50, dog=50)


def test_more_rounds_are_suggested_if_the_accuracy_rises_to_the_end(clean_db: Database) -> None:
    desk, north = federation(clean_db, rounds=6)
    run(desk, north, range(1, 6))
    assert (desk.view.state, desk.view.more_rounds) == ("running", None), "not while rounds are left"
    run(desk, north, range(6, 7))
    assert (desk.view.state, desk.view.more_rounds) == ("finished", 5)
    assert federations.show(desk.ctx, desk.name, north.client_id).more_rounds == 5


def test_none_are_suggested_once_it_no_longer_rises(clean_db: Database) -> None:
    desk, north = federation(clean_db, rounds=6)
    run(desk, north, range(1, 7), rise=0)
    assert (desk.view.state, desk.view.more_rounds) == ("finished", None)


def test_none_are_suggested_without_measurements(clean_db: Database) -> None:
    desk, north = federation(clean_db, rounds=5)
    for number in range(1, 6):
        desk.run_round({north: number})
    assert (desk.view.state, desk.view.more_rounds) == ("finished", None)


def test_only_the_models_behind_the_newest_one_count(clean_db: Database) -> None:
    desk, north = federation(clean_db, rounds=5)
    run(desk, north, range(1, 6), rise=0)
    rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)  # published as model 6
    federations.resume(desk.ctx, OPERATOR, desk.name)
    run(desk, north, range(7, 11))
    assert (desk.view.state, desk.view.more_rounds) == ("finished", 5)
