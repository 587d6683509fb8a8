"""The federation's class totals: every task carries them, whatever has happened to the federation."""

from pathlib import Path

from sqlalchemy import update
from support.api import Api
from support.api_calls import unique_plan, upload_update
from support.coordinator import Site

from server.service import archive
from server.service.context import Actor
from server.store.tables import Federation, Round
from shared.contract.class_totals import CLASS_TOTALS, read_class_totals
from shared.contract.messages import TaskAnswer
from shared.contract.plan import FederationPlan

NORTH, SOUTH = {"cat": 6, "dog": 2}, {"dog": 4}


def totals(task: TaskAnswer) -> tuple[int, ...] | None:
    if task.round is not None:
        assert task.round.facts == task.facts
    return read_class_totals(task.facts, classes=2)


def two_sites(api: Api, plan: FederationPlan) -> list[Site]:
    api.create(plan)
    return [api.join(plan, "north", NORTH), api.join(plan, "south", SOUTH)]


def run_round(sites: list[Site], number: int) -> None:
    for seed, site in enumerate(sites):
        site.wait_for_round(number)
        upload_update(site, seed)
    for site in sites:
        site.wait_for_model(number)


def test_reach_sites_before_during_and_after_training(api: Api) -> None:
    plan = unique_plan(rounds={"count": 1, "min_clients": 2})
    api.create(plan)
    north = api.join(plan, "north", NORTH)
    waiting = north.task(wait_s=0)
    assert (waiting.action, totals(waiting)) == ("wait", (6, 2)), "the sites that have joined so far"
    south = api.join(plan, "south", SOUTH)
    for site in (north, south):
        training = site.wait_for_round(1)
        assert (training.action, totals(training)) == ("train", (6, 6))
    run_round([north, south], 1)
    assert totals(north.wait_until_finished()) == (6, 6)


def test_change_with_the_next_round_only(api: Api) -> None:
    plan = unique_plan(rounds={"count": 2, "min_clients": 2})
    north, south = two_sites(api, plan)
    counts = {"class_counts": {"cat": 100}}
    assert api.call("PATCH", "/v1/me", token=south.token, json=counts).status_code == 200
    assert totals(north.wait_for_round(1)) == (6, 6)
    run_round([north, south], 1)
    assert totals(north.wait_for_round(2)) == (106, 2)


def test_return_with_the_model_that_is_rolled_back_to(api: Api) -> None:
    plan = unique_plan(rounds={"count": 3, "min_clients": 2})
    sites = two_sites(api, plan)
    run_round(sites, 1)
    west = api.join(plan, "west", {"cat": 1})
    run_round(sites, 2)  # opened before west joined
    assert totals(west.wait_for_round(3)) == (7, 6)
    api.admin("POST", f"/v1/federations/{plan.name}/rollback", json={"to": 1})
    task = sites[0].task(wait_s=0)
    assert (task.action, task.model.number if task.model else None, totals(task)) == ("paused", 4, (6, 6))


def test_of_an_imported_federation_are_those_of_the_sites_that_have_joined_again(api: Api, tmp_path: Path) -> None:
    plan = unique_plan(rounds={"count": 3, "min_clients": 2})
    run_round(two_sites(api, plan), 1)
    ctx, operator = api.app.state.ctx, Actor("operator")
    source = archive.export(ctx, operator, plan.name, tmp_path / "export")
    copy = plan.model_copy(update={"name": archive.restore(ctx, operator, source, f"{plan.name}-copy")})
    north = api.join(copy, "north", NORTH)
    assert totals(north.task(wait_s=0)) == (6, 2)
    south = api.join(copy, "south", SOUTH)
    assert totals(north.task(wait_s=0)) == (6, 6)
    api.admin("POST", f"/v1/federations/{copy.name}/resume")
    assert totals(south.wait_for_round(2)) == (6, 6)


def test_are_worked_out_for_rounds_of_releases_that_did_not_store_them(api: Api) -> None:
    plan = unique_plan(method={"name": "fedavg"}, rounds={"count": 1, "min_clients": 2})
    sites = two_sites(api, plan)
    run_round(sites, 1)
    with api.app.state.ctx.db.write() as session:
        found = session.query(Federation.id).filter(Federation.name == plan.name).scalar()
        session.execute(update(Round).where(Round.federation_id == found).values(facts="{}"))
    assert totals(sites[0].wait_until_finished()) == (6, 6)


def test_are_part_of_the_json_of_rounds(api: Api) -> None:
    plan = unique_plan(rounds={"count": 1, "min_clients": 2})
    two_sites(api, plan)
    (round_,) = api.admin("GET", f"/v1/federations/{plan.name}/rounds")
    assert round_["facts"][CLASS_TOTALS] == "6,6"
