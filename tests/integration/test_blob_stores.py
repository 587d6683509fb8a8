"""Uploads, downloads and aggregation with tensors in SQL, in a bucket and in a folder, and crashes in between."""

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import select
from support.api import Api, open_api, problem_of
from support.coordinator import Site
from support.databases import new_database
from support.desk import OPERATOR, Clock, Desk, count, fedavg_plan, mean_bits, unreferenced_blobs
from support.plans import small_plan, update_body
from support.processes import LoggedProcess

from server.core.errors import Gone, InvalidInput
from server.service import archive
from server.service.aggregation import Aggregator
from server.service.cleaning import Cleaner
from server.service.retention import Retention
from server.service.uploads import resumable, single_request
from server.store import blobs
from server.store.database import Database
from server.store.objects import spool
from server.store.objects.addresses import open_store
from server.store.objects.bucket import Bucket
from server.store.objects.spool import Spool
from server.store.objects.store import ObjectMissing, ObjectStoreError
from server.store.ownership import claim
from server.store.tables import Blob, BlobChunk, Coordinator, Transfer
from shared.contract.messages import UpdateReceipt
from shared.tensors.wire import digest

OUTSIDE = ("s3", "file")
STORES = ("sql", *OUTSIDE)
NOW = time.time  # objects have timestamps of the store's own clock


def address_of(kind: str, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("bucket" if kind == "s3" else "spool_address"))


@pytest.fixture(params=STORES)
def blob_address(request: pytest.FixtureRequest) -> str | None:
    return None if request.param == "sql" else address_of(request.param, request)


@pytest.fixture
def db(sqlite_url: str, blob_address: str | None) -> Iterator[Database]:
    database = Database(sqlite_url, blob_address)
    yield database
    database.close()


def objects_of(db: Database) -> set[str]:
    assert db.objects is not None
    return {key for page in db.objects.list_keys() for key in page}


def keys_of(db: Database) -> set[str | None]:
    with db.read() as session:
        return set(session.execute(select(BlobChunk.object_key)).scalars())


def check_in_step(db: Database) -> None:
    """Check that chunks and objects match one to one, or that there are no objects at all."""
    assert keys_of(db) <= {None} if db.objects is None else keys_of(db) == objects_of(db)


def test_a_round_of_whole_and_of_resumed_uploads(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "CHUNK_BYTES", 5_000)  # several chunks per model
    desk = Desk(db, fedavg_plan(min_clients=2))
    left, right = desk.join("left"), desk.join("right")
    bodies = [desk.body(1), desk.body(2)]
    desk.put(left, bodies[0])
    round_id, whole = desk.round.id, bodies[1]
    for begin, end in ((0, 7_000), (7_000, 7_001), (7_001, len(whole))):
        part = resumable.UploadPart(desk.ctx, right, round_id, begin, len(whole), digest(whole))
        part.feed(whole[begin:end])
        done = part.finish()
    assert isinstance(done, UpdateReceipt)
    check_in_step(db)
    desk.aggregate()
    assert desk.bits(1) == mean_bits(bodies)
    check_in_step(db)


def test_rejected_and_interrupted_uploads_leave_nothing(db: Database) -> None:
    desk = Desk(db)
    left = desk.join("left")
    before = count(db, Blob, BlobChunk)
    with pytest.raises(InvalidInput):
        desk.put(left, desk.body(1)[:-10])
    torn = single_request.SingleRequestUpload(desk.ctx, left, desk.round.id, None, None)
    torn.feed(desk.body(1)[:9_000])
    torn.abandon()
    assert count(db, Blob, BlobChunk) == before
    assert count(db, Transfer) == [0]
    check_in_step(db)


def test_what_retention_drops(db: Database) -> None:
    desk = Desk(db)
    left = desk.join("left")
    for seed in range(3):
        desk.run_round({left: seed})
    assert Cleaner(desk.ctx, Retention(keep_round_uploads=0)).clean() == 3
    assert unreferenced_blobs(db) == set()
    check_in_step(db)


@pytest.fixture
def api(sqlite_url: str, blob_address: str | None) -> Iterator[Api]:
    with open_api(sqlite_url, blobs=blob_address) as api:
        yield api


def test_downloads_and_ranges(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "CHUNK_BYTES", 5_000)
    plan = small_plan(method={"name": "fedavg"}, rounds={"min_clients": 1})
    api.create(plan)
    site = api.join(plan, "left", {"cat": 1})
    url = site.task().model.url
    whole = api.call("GET", url).content
    assert len(whole) > 15_000
    for first, last in ((0, 0), (4_999, 5_000), (3_000, 12_000), (len(whole) - 1, len(whole) + 5)):
        part = api.call("GET", url, headers={"Range": f"bytes={first}-{last}"})
        assert (part.status_code, part.content) == (206, whole[first : last + 1])
    assert Site(api.http, plan, "left", site.token).put(site.task().round.id, update_body(plan, {})).status_code == 200


@pytest.fixture(params=OUTSIDE)
def address(request: pytest.FixtureRequest) -> str:
    return address_of(request.param, request)


@pytest.fixture
def outside(sqlite_url: str, address: str) -> Iterator[Database]:
    database = Database(sqlite_url, address)
    yield database
    database.close()


@contextmanager
def out_of_order() -> Iterator[None]:
    """Let every use of an object store fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "_call", _fail)
        patch.setattr(Spool, "_readable_errors", _fail)
        yield


def test_a_crash_after_the_object_and_before_its_row(outside: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object is garbage, and is deleted once it is too old for anyone to be about to refer to it."""
    monkeypatch.setattr(spool, "_FLUSH_BYTES", 1)
    desk = Desk(outside, clock=Clock(NOW()))
    torn = single_request.SingleRequestUpload(desk.ctx, desk.join("left"), desk.round.id, None, None)
    torn.feed(desk.body(1)[:5_000])
    kept = objects_of(outside)
    blobs.Writer(outside, uuid.uuid4().hex).write(b"and then the process died")
    assert len(objects_of(outside)) == len(kept) + 1
    cleaner = Cleaner(desk.ctx, Retention())
    assert cleaner.collect_objects() == 0
    desk.clock.jump(100 * 86400)  # no wall clock decides what is garbage
    assert cleaner.collect_objects() == 0
    desk.clock.advance(3700)
    assert cleaner.collect_objects() == 1
    assert objects_of(outside) == kept


def test_a_crash_after_the_row_and_before_its_object(outside: Database) -> None:
    desk = Desk(outside, clock=Clock(NOW()))
    blob_id = blobs.store(outside, b"soon gone")
    with out_of_order(), outside.write() as session:
        blobs.remove_in(session, blob_id)
    assert keys_of(outside) < objects_of(outside)
    cleaner = Cleaner(desk.ctx, Retention())
    assert cleaner.collect_objects() == 0
    desk.clock.advance(3700)
    assert cleaner.collect_objects() == 1
    check_in_step(outside)


def _fail(*_: object, **__: object) -> None:
    raise ObjectStoreError("The object store failed: it is away")


def test_a_transaction_that_fails_keeps_its_objects(outside: Database) -> None:
    blob_id = blobs.store(outside, b"still needed")

    def drop_and_fail() -> None:
        with outside.write() as session:
            blobs.remove_in(session, blob_id)
            raise LookupError

    with pytest.raises(LookupError):
        drop_and_fail()
    assert blobs.read_all(outside, blob_id) == b"still needed"


def test_aggregation_waits_for_an_unavailable_object_store(outside: Database) -> None:
    """Aggregation waits for the store; the round does not fail."""
    desk = Desk(outside)
    left = desk.join("left")
    body = desk.body(1)
    desk.put(left, body)
    with out_of_order():
        assert Aggregator(desk.ctx).step() is False
        assert desk.round.state == "aggregating"
    desk.aggregate()
    assert desk.bits(1) == mean_bits([body])


def test_callers_are_told_to_try_again(sqlite_url: str, address: str) -> None:
    with open_api(sqlite_url, blobs=address) as api, out_of_order():
        answer = api.call("POST", "/v1/federations", json=small_plan().model_dump(mode="json"))
        assert problem_of(answer) == (503, "object-store-unavailable")
        assert answer.headers["retry-after"] == "5"


def test_blobs_from_before_the_switch_are_still_read(sqlite_url: str, address: str) -> None:
    before = Database(sqlite_url)
    old = blobs.store(before, b"in SQL")
    before.close()
    after = Database(sqlite_url, address)
    new = blobs.store(after, b"in an object")
    assert [blobs.read_all(after, blob_id) for blob_id in (old, new)] == [b"in SQL", b"in an object"]
    after.close()
    forgetful = Database(sqlite_url)
    assert blobs.read_all(forgetful, old) == b"in SQL"
    with pytest.raises(ObjectStoreError, match="Set DISTRANS_BLOBS"):
        blobs.read_all(forgetful, new)
    forgetful.close()


def test_blobs_in_another_place_are_not_looked_for_in_this_one(
    sqlite_url: str, bucket: str, spool_address: str
) -> None:
    for written, now in ((bucket, spool_address), (spool_address, bucket)):
        before = Database(sqlite_url, written)
        blob_id = blobs.store(before, b"a model")
        before.close()
        after = Database(sqlite_url, now)
        with pytest.raises(ObjectStoreError, match=f"in another place: DISTRANS_BLOBS is {now}"):
            blobs.read_all(after, blob_id)
        after.close()


@pytest.mark.parametrize(
    ("wrong", "next_step"),
    [
        ("s3:/bucket", "s3://bucket/prefix"),
        ("s3://B!", "s3://bucket/prefix"),
        ("s3://bucket/a b", "s3://bucket/prefix"),
        ("gs://bucket/x", "file:///path/to/folder or s3://bucket/prefix"),
        ("/srv/spool", "file:///path/to/folder or s3://bucket/prefix"),
        ("file://srv/spool", "file:///path/to/folder"),
        ("file:///", "file:///path/to/folder"),
        ("file:///srv/spool?mode=rw", "file:///path/to/folder"),
    ],
)
def test_invalid_object_store_url_is_refused(wrong: str, next_step: str) -> None:
    with pytest.raises(ObjectStoreError, match=next_step):
        open_store(wrong)


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    Bucket(bucket).check()
    with pytest.raises(ObjectStoreError, match="s3://elsewhere"):
        Bucket("s3://elsewhere/x").check()


class TestAnOwnedPlace:
    """A prefix or folder belongs to one coordinator, whose replicas share an identity in their database."""

    @pytest.fixture
    def other(self, request: pytest.FixtureRequest, tmp_path: Path, address: str) -> Iterator[Database]:
        """Another coordinator with the same place."""
        (tmp_path / "other").mkdir()
        database = Database(new_database("sqlite", request, tmp_path / "other"), address)
        yield database
        database.close()

    def test_is_refused_to_another_coordinator(self, outside: Database, other: Database) -> None:
        blob_id = blobs.store(outside, b"a model")
        before = objects_of(outside)
        for step in (lambda: claim(other), lambda: blobs.store(other, b"another's")):
            with pytest.raises(ObjectStoreError, match="belongs to coordinator") as caught:
                step()
            assert str(caught.value.next_step).startswith(
                "Set DISTRANS_BLOBS to a prefix or folder that no other coordinator uses."
            )
        assert objects_of(outside) == before
        assert blobs.read_all(outside, blob_id) == b"a model"

    def test_is_never_collected_by_another_coordinator(self, outside: Database, other: Database) -> None:
        """Every object would look like garbage to it."""
        blob_id = blobs.store(outside, b"a model")
        with pytest.raises(ObjectStoreError, match="belongs to coordinator"):
            blobs.delete_objects(other, blobs.unreferenced_objects(other))
        assert blobs.read_all(outside, blob_id) == b"a model"

    def test_is_shared_by_replicas_that_start_together(self, outside: Database, address: str) -> None:
        replicas = [Database(outside.url.render_as_string(), address) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(claim, replicas))
        claim(outside)
        assert count(outside, Coordinator) == [1]
        for replica in replicas:
            replica.close()

    def test_keeps_its_mark(self, outside: Database) -> None:
        claim(outside)
        assert blobs.unreferenced_objects(outside) == set()
        assert outside.objects is not None
        with outside.read() as session:
            assert outside.objects.claim("somebody else") == session.get_one(Coordinator, 1).id

    def test_of_another_coordinator_is_refused_at_the_start(
        self, outside: Database, address: str, tmp_path: Path
    ) -> None:
        claim(outside)
        command = ["distrans-server", "serve", "--port", "0", "--data-dir", tmp_path / "second"]
        process = LoggedProcess(command, forked=True, DISTRANS_BLOBS=address)
        assert process.wait() == 1
        assert process.lines[-1].startswith(f"error: {address} belongs to coordinator ")


class TestAnObjectThatIsLost:
    def test_is_named(self, outside: Database, address: str) -> None:
        blob_id = blobs.store(outside, b"a model")
        (key,) = objects_of(outside)
        assert outside.objects is not None
        outside.objects.delete([key])
        with pytest.raises(ObjectMissing, match=f"The object {key} is missing from {address}") as caught:
            blobs.read_all(outside, blob_id)
        assert caught.value.key == key

    @pytest.mark.usefixtures("bucket")
    def test_is_not_one_in_a_bucket_that_is_away(self) -> None:
        with pytest.raises(ObjectStoreError) as caught:
            Bucket("s3://elsewhere/x").get("some/key", 0, 1)
        assert not isinstance(caught.value, ObjectMissing)

    def test_ends_an_export_that_needs_it(self, outside: Database, tmp_path: Path) -> None:
        desk = Desk(outside)
        assert outside.objects is not None
        outside.objects.delete(sorted(objects_of(outside)))
        with pytest.raises(Gone, match=r"is not in the object store\.") as caught:
            archive.export(desk.ctx, OPERATOR, desk.name, tmp_path / "export")
        assert caught.value.code == "tensors-dropped"
        assert not [file for file in tmp_path.iterdir() if "export" in file.name]
