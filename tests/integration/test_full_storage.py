"""A full disk is reported as such, uploads wait for space, and what an operator needs still works."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from support.api import Api, open_api, problem_of
from support.coordinator import Site
from support.plans import small_plan, update_body

from server.service.cleaning import Cleaner
from server.service.retention import Retention
from server.store import database, failures
from server.store.database import Database, DatabaseOptions
from server.store.objects.bucket import Bucket
from server.store.objects.store import ObjectStoreFull

# Larger than a few pages, so that an upload cannot fit into those that are there.
PLAN = small_plan(method={"name": "fedavg"}, model={"dense_dim": 1000}, rounds={"min_clients": 1, "count": 3})
BODY = update_body(PLAN, {}, 1)


def begin_round(api: Api) -> tuple[Site, int]:
    api.create(PLAN)
    site = api.join(PLAN, "north", {"cat": 1})
    return site, site.task().round.id


@pytest.fixture
def disk(sqlite_url: str) -> Iterator["Disk"]:
    with open_api(sqlite_url) as api:
        yield Disk(api)


class Disk:
    """Stops SQLite's file from growing, like a full disk: both end in SQLITE_FULL."""

    def __init__(self, api: Api) -> None:
        self.api, self.db = api, api.app.state.ctx.db

    def fill(self) -> None:
        with self.db.engine.connect() as connection:
            connection.connection.cursor().execute("VACUUM")  # no free pages are left
        event.listen(self.db.engine, "connect", self._limit)
        self.db.engine.dispose()

    def make_room(self) -> None:
        event.remove(self.db.engine, "connect", self._limit)
        self.db.engine.dispose()

    @staticmethod
    def _limit(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # never below the current size


class TestADiskThatIsFull:
    def test_refuses_uploads_until_there_is_room(
        self, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        site, round_id = begin_round(disk.api)
        disk.fill()
        refused = site.put(round_id, BODY)
        assert problem_of(refused) == (507, "storage-full")
        assert refused.headers["retry-after"] == "60"
        assert "no space left" in refused.json()["detail"]
        unready = disk.api.call("GET", "/readyz", token=None)
        assert problem_of(unready) == (503, "storage-full")
        assert "storage is full: database or disk is full" in caplog.text
        disk.make_room()
        monkeypatch.setattr(database, "_FULL_FOR_S", 0.0)
        assert disk.api.call("GET", "/readyz", token=None).status_code == 200
        assert site.put(round_id, BODY).status_code == 200

    def test_keeps_a_resumable_upload_as_far_as_it_came(self, disk: Disk) -> None:
        site, round_id = begin_round(disk.api)
        assert site.patch(round_id, BODY[:5_000], 0, BODY).status_code == 204
        disk.fill()
        assert problem_of(site.patch(round_id, BODY[5_000:], 5_000, BODY)) == (507, "storage-full")
        disk.make_room()
        assert site.patch(round_id, BODY[5_000:], 5_000, BODY).status_code == 200


class TestTheReserve:
    """Deletions, revocations and the audit log need space too, so uploads may not use the last of it."""

    @pytest.fixture
    def scarce(self, sqlite_url: str) -> Iterator[Api]:
        with open_api(sqlite_url) as api:
            yield api

    def test_is_not_for_uploads(self, scarce: Api) -> None:
        site, round_id = begin_round(scarce)
        assert scarce.call("GET", "/readyz", token=None).status_code == 200
        use_up_all_but_the_reserve(scarce)
        assert problem_of(site.put(round_id, BODY)) == (507, "storage-full")
        assert problem_of(site.patch(round_id, BODY, 0, BODY)) == (507, "storage-full")
        assert problem_of(scarce.call("GET", "/readyz", token=None)) == (503, "storage-full")

    def test_is_for_everything_else(self, scarce: Api) -> None:
        site, round_id = begin_round(scarce)
        assert site.put(round_id, BODY).status_code == 200
        use_up_all_but_the_reserve(scarce)
        revoke = scarce.call("POST", f"/v1/federations/{PLAN.name}/clients/north/revoke")
        assert revoke.status_code in (200, 204), revoke.text
        assert problem_of(site.put(round_id, BODY)) == (403, "client-revoked")
        # Not necessarily the last one: without its only client, the federation is paused in the background.
        assert "client.revoke" in {entry["action"] for entry in scarce.admin("GET", "/v1/audit")}
        Cleaner(scarce.app.state.ctx, Retention(keep_round_uploads=0)).clean()

    def test_counts_what_the_file_can_use_again(self, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """SQLite reuses the pages of deleted rows: cleaning frees space although the file does not shrink."""
        db = Database(sqlite_url)
        monkeypatch.setattr(Database, "_free_bytes", lambda _db: 60 * 1024 * 1024)
        assert db.is_full()
        with db.write() as writing:
            writing.connection().exec_driver_sql("CREATE TABLE filler AS SELECT zeroblob(5 * 1024 * 1024) AS data")
        assert db.is_full()
        with db.write() as writing:
            writing.connection().exec_driver_sql("DROP TABLE filler")
        assert not db.is_full()
        db.close()


def use_up_all_but_the_reserve(api: Api) -> None:
    db = api.app.state.ctx.db
    db.options = DatabaseOptions(reserve_bytes=2 * db._free_bytes())


class TestErrors:
    def test_of_postgresql_are_told_apart(self) -> None:
        def wrapped(kind: type[psycopg.Error]) -> OperationalError:
            return OperationalError("INSERT", {}, kind("no"))

        errors = psycopg.errors
        assert failures.is_full(wrapped(errors.DiskFull))
        for kind in (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected, errors.TooManyConnections):
            assert failures.is_busy(wrapped(kind))
            assert not failures.is_full(wrapped(kind))
        for kind in (errors.AdminShutdown, errors.UndefinedTable):
            assert not failures.is_busy(wrapped(kind))
            assert not failures.is_full(wrapped(kind))

    def test_of_an_object_store_without_room(
        self, sqlite_url: str, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError("Error performing PUT: 507 Insufficient Storage: <Error><Code>XMinioStorageFull</Code>")

        with open_api(sqlite_url, blobs=bucket) as api:
            site, round_id = begin_round(api)
            with monkeypatch.context() as patch:
                patch.setattr("obstore.put", full)
                with pytest.raises(ObjectStoreFull, match="is full"):
                    Bucket(bucket).put("blob", b"bytes")
                assert problem_of(site.put(round_id, BODY)) == (507, "storage-full")
                assert problem_of(api.call("GET", "/readyz", token=None)) == (503, "storage-full")
            assert site.put(round_id, BODY).status_code == 200
