"""Calls to the coordinator's API that several tests make."""

import itertools
from typing import Any

from sqlalchemy import func, select
from support.api import SocketApi
from support.coordinator import Coordinator, Site
from support.plans import small_plan, update_body

from server.store.tables import Transfer
from shared.contract.plan import FederationPlan

_NUMBERS = itertools.count(1)


def unique_plan(**tables: Any) -> FederationPlan:
    """Return a small plan with a new name, so that tests can share a coordinator."""
    return small_plan(f"pets-{next(_NUMBERS)}", **tables)


def create_invite(api: Coordinator, federation: str) -> str:
    """Return the token of a new invite."""
    return str(api.admin("POST", f"/v1/federations/{federation}/invites")["token"])


def upload_update(site: Site, seed: int = 0) -> None:
    """Do one site's part in a round."""
    task = site.task()
    assert task.round is not None
    assert site.put(task.round.id, update_body(site.plan, task.facts, seed)).status_code == 200


def open_round(api: SocketApi, plan: FederationPlan, *names: str) -> tuple[int, list[Site]]:
    """Create a federation whose round is open for these sites; return the round's id and the sites."""
    api.create(plan)
    sites = [api.join(plan, name, {"cat": 1}) for name in names]
    task = sites[-1].task()
    assert task.round is not None
    return task.round.id, sites


def open_round_of_two(api: SocketApi) -> tuple[int, Site, Site]:
    """Open a FedAvg round for two sites, so that it stays open after one upload."""
    plan = unique_plan(method={"name": "fedavg"}, rounds={"min_clients": 2})
    round_id, (north, south) = open_round(api, plan, "north", "south")
    return round_id, north, south


def large_plan(**rounds: Any) -> FederationPlan:
    """Return a FedAvg plan whose model has several chunks."""
    image = {"height": 32, "width": 32}
    return unique_plan(method={"name": "fedavg"}, model={"dense_dim": 10_000}, image=image, rounds=rounds)


def count_transfers(api: SocketApi, round_id: int) -> int:
    """Return how many uploads to the round are in progress."""
    with api.app.state.ctx.db.read() as session:
        query = select(func.count()).select_from(Transfer).where(Transfer.round_id == round_id)
        return int(session.execute(query).scalar_one())
