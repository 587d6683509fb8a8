"""Tensors in a folder: private, exactly as validated, resumable after any crash, and bounded by the disk."""

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.api import open_api, problem_of
from support.api_calls import large_plan
from support.coordinator import CoordinatorProcess, Site
from support.desk import Desk, count, fedavg_plan, mean_bits, refused, unreferenced_blobs
from support.plans import report, small_plan, update_body, update_tensors
from support.processes import LoggedProcess
from support.sockets import RawConnection
from support.uploads import Sites
from support.waiting import eventually

from server.core.errors import Conflict
from server.service.cleaning import Cleaner
from server.service.context import Context
from server.service.retention import Retention
from server.service.uploads import resumable, single_request
from server.service.uploads.resumable import OffsetMismatch, UploadPart
from server.store import blobs
from server.store.database import Database, DatabaseOptions
from server.store.objects import spool
from server.store.objects.spool import Spool
from server.store.objects.store import ObjectStoreError, ObjectStoreFull
from server.store.tables import BlobChunk, Transfer
from shared.contract.messages import UpdateReceipt
from shared.tensors.wire import digest, digest_header, encode


@pytest.fixture
def db(sqlite_url: str, spool_address: str) -> Iterator[Database]:
    database = Database(sqlite_url, spool_address)
    yield database
    database.close()


@pytest.fixture
def desk(db: Database) -> Desk:
    return Desk(db, fedavg_plan(min_clients=2))


def files(db: Database) -> list[Path]:
    assert isinstance(db.objects, Spool)
    return sorted(file for file in db.objects.folder.iterdir() if db.objects.holds(file.name))


class TestFiles:
    def test_are_private_whatever_the_folder_and_the_umask(self, db: Database, tmp_path: Path) -> None:
        (tmp_path / "spool").chmod(0o777)
        before = os.umask(0)
        try:
            blobs.store(db, b"a model")
        finally:
            os.umask(before)
        (file,) = files(db)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (file.parent, file)] == [0o700, 0o600]
        assert stat.S_IMODE((file.parent / ".distrans-owner").stat().st_mode) == 0o600

    def test_folder_that_others_can_read_is_closed_to_them(
        self, db: Database, caplog: pytest.LogCaptureFixture
    ) -> None:
        blobs.store(db, b"a model")
        folder = files(db)[0].parent
        folder.chmod(0o755)
        assert db.objects is not None
        db.objects.check()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert f"{folder} was accessible to other users (mode 755); changed to 700" in caplog.text

    def test_hold_a_whole_upload_each(
        self, desk: Desk, sites: Sites, db: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is read is what arrived, in one file, whatever the size of the pieces."""
        monkeypatch.setattr(spool, "_FLUSH_BYTES", 3000)
        body = desk.body(1)
        upload = single_request.SingleRequestUpload(desk.ctx, sites[0], desk.round.id, None, len(body))
        before = set(files(db))
        for begin in range(0, len(body), 777):
            upload.feed(body[begin : begin + 777])
        upload.finish()
        (file,) = set(files(db)) - before
        assert file.read_bytes() == body

    @pytest.mark.parametrize(
        "key", ["../../etc/passwd", "a/b", "", f"{'0' * 32}.{'g' * 32}", f"{'0' * 32}.{'0' * 31}/"]
    )
    def test_names_that_are_not_keys_never_reach_the_file_system(self, db: Database, key: str) -> None:
        assert db.objects is not None
        with pytest.raises(ObjectStoreError, match="is not the name of a file"):
            db.objects.get(key, 0, 1)


class TestFolder:
    def test_that_is_missing_is_an_error_with_a_next_step(self, tmp_path: Path) -> None:
        command = ["distrans-server", "serve", "--port", "0", "--data-dir", tmp_path / "data"]
        process = LoggedProcess(command, forked=True, DISTRANS_BLOBS=f"file://{tmp_path / 'missing'}")
        assert process.wait() == 1
        assert process.lines[-1] == (
            f"error: There is no folder {tmp_path / 'missing'}, which DISTRANS_BLOBS names. "
            "Create it, or mount the disk that it is on."
        )
        assert not (tmp_path / "missing").exists()

    def test_that_is_read_only_is_an_error_with_a_next_step(
        self, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert db.objects is not None
        monkeypatch.setattr(os, "open", failing(errno.EROFS))
        with pytest.raises(ObjectStoreError, match="cannot be used: Read-only file system") as caught:
            db.objects.check()
        assert str(tmp_path / "spool") in caught.value.message
        assert caught.value.next_step == "Make it readable and writable for the user that runs the coordinator."

    def test_that_disappears_is_reported_until_it_is_back(self, sqlite_url: str, spool_address: str) -> None:
        plan = small_plan(method={"name": "fedavg"}, rounds={"min_clients": 1, "count": 3})
        with open_api(sqlite_url, blobs=spool_address) as api:
            api.create(plan)
            site = api.join(plan, "north", {"cat": 1})
            round_id = site.task().round.id
            home = api.app.state.ctx.db.objects.home
            home.rename(home.with_name("unmounted"))
            assert problem_of(site.put(round_id, update_body(plan, {}, 1))) == (503, "object-store-unavailable")
            assert problem_of(api.call("GET", "/readyz", token=None)) == (503, "object-store-unavailable")
            home.with_name("unmounted").rename(home)
            assert api.call("GET", "/readyz", token=None).status_code == 200
            assert site.put(round_id, update_body(plan, {}, 1)).status_code == 200


def failing(code: int) -> Callable[..., int]:
    """Return what takes the place of a function of `os`."""

    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


class TestUploads:
    def test_by_two_requests_at_once_are_not_mixed_up(self, desk: Desk, sites: Sites, db: Database) -> None:
        """Bytes of the request that lost, which nobody validated, are nowhere in the update."""
        left, body = sites[0], desk.body(1)
        poison = {
            name: torch.full_like(value, float("nan")) for name, value in update_tensors(desk.plan, {}, 1).items()
        }
        bad = encode(poison, {"report": report().model_dump_json()})
        first = UploadPart(desk.ctx, left, desk.round.id, 0, len(body))
        second = UploadPart(desk.ctx, left, desk.round.id, 0, len(body))
        first.feed(body[:9000])
        second.feed(bad[: len(body)])
        first.feed(body[9000:])
        assert isinstance(first.finish(), UpdateReceipt)
        refused(Conflict, "upload-replaced", second.save)
        desk.upload(sites[1], 2)
        desk.aggregate()
        assert desk.bits(1) == mean_bits([body, update_body(desk.plan, {}, 2)])
        assert unreferenced_blobs(db) == set()
        assert blobs.unreferenced_objects(db) == set()

    def test_that_lose_the_race_leave_no_file(self, desk: Desk, sites: Sites, db: Database) -> None:
        left, body = sites[0], desk.body(1)
        slow = UploadPart(desk.ctx, left, desk.round.id, 0, len(body), digest(body))
        fast = UploadPart(desk.ctx, left, desk.round.id, 0, len(body), digest(body))
        slow.feed(body[:2000])
        fast.feed(body[:3000])
        fast.save()
        with pytest.raises(OffsetMismatch):
            slow.save()
        assert blobs.unreferenced_objects(db) == set()
        assert resumable.status(desk.ctx, left, desk.round.id).offset_bytes == 3000

    def test_continue_after_a_crash_where_the_recorded_bytes_end(
        self, desk: Desk, sites: Sites, db: Database, spool_address: str
    ) -> None:
        """The file may hold more than was recorded, and after a power cut even garbage: that does not count."""
        left, body = sites[0], desk.body(1)
        before = set(files(db))
        part = UploadPart(desk.ctx, left, desk.round.id, 0, len(body), digest(body))
        part.feed(body[:7000])
        part.save()
        part.feed(body[7000:9000])  # written but not recorded when the process dies
        (file,) = set(files(db)) - before
        with file.open("ab") as garbage:
            garbage.write(b"\xff" * 5000)
        replica = Database(db.url.render_as_string(), spool_address)  # another process on the same folder
        ctx = Context(replica, desk.clock)
        assert resumable.status(ctx, left, desk.round.id).offset_bytes == 7000
        rest = UploadPart(ctx, left, desk.round.id, 7000, len(body), digest(body))
        rest.feed(body[7000:])
        assert isinstance(rest.finish(), UpdateReceipt)
        desk.upload(sites[1], 2)
        desk.aggregate()
        assert desk.bits(1) == mean_bits([body, update_body(desk.plan, {}, 2)])
        replica.close()

    def test_that_never_finish_are_removed_with_their_files(self, desk: Desk, sites: Sites, db: Database) -> None:
        before = files(db), count(db, BlobChunk)
        left, body = sites[0], desk.body(1)
        part = UploadPart(desk.ctx, left, desk.round.id, 0, len(body), digest(body))
        part.feed(body[:7000])
        part.save()
        resumable.cancel(desk.ctx, left, desk.round.id)
        torn = single_request.SingleRequestUpload(desk.ctx, left, desk.round.id, None, None)
        torn.feed(body[:9000])
        torn.abandon()
        assert (files(db), count(db, BlobChunk)) == before
        part = UploadPart(desk.ctx, left, desk.round.id, 0, len(body), digest(body))
        part.feed(body[:7000])
        part.save()
        desk.wait(25 * 3600)
        Cleaner(desk.ctx, Retention()).clean()
        assert (files(db), count(db, BlobChunk), count(db, Transfer)) == (*before, [0])

    def test_are_synced_before_they_are_recorded(
        self, desk: Desk, sites: Sites, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[str] = []
        sync, folder = os.fsync, spool.sync_folder
        monkeypatch.setattr(os, "fsync", lambda descriptor: (steps.append("file"), sync(descriptor))[1])
        monkeypatch.setattr(spool, "sync_folder", lambda path: (steps.append("folder"), folder(path))[1])
        append = blobs.append
        monkeypatch.setattr(blobs, "append", lambda *given: (steps.append("row"), append(*given))[1])
        desk.upload(sites[0], 1)
        assert [step for step in steps if step in ("folder", "row")][:2] == ["folder", "row"]
        assert steps[0] == "file"
        assert steps.index("row") > steps.index("folder")


class TestAFullDisk:
    @pytest.fixture
    def plan_body(self) -> bytes:
        return update_body(fedavg_plan(), {}, 1)

    def test_refuses_uploads_until_there_is_room(
        self, sqlite_url: str, spool_address: str, plan_body: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = fedavg_plan(min_clients=1)
        with open_api(sqlite_url, blobs=spool_address) as api:
            api.create(plan)
            site = api.join(plan, "north", {"cat": 1})
            round_id = site.task().round.id
            before = files(api.app.state.ctx.db)
            assert site.patch(round_id, plan_body[:5000], 0, plan_body).status_code == 204
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", failing(errno.ENOSPC))
                assert problem_of(site.put(round_id, plan_body)) == (507, "storage-full")
                assert problem_of(api.call("GET", "/readyz", token=None)) == (503, "storage-full")
            assert files(api.app.state.ctx.db) == before
            assert site.put(round_id, plan_body).status_code == 200

    def test_is_not_filled_up_to_the_last_byte(self, sqlite_url: str, spool_address: str, plan_body: bytes) -> None:
        plan = fedavg_plan(min_clients=1)
        with open_api(sqlite_url, blobs=spool_address) as api:
            api.create(plan)
            site = api.join(plan, "north", {"cat": 1})
            round_id = site.task().round.id
            db = api.app.state.ctx.db
            db.options = DatabaseOptions(reserve_bytes=2 * db.objects.free_bytes())
            assert problem_of(site.put(round_id, plan_body)) == (507, "storage-full")
            assert problem_of(site.patch(round_id, plan_body, 0, plan_body)) == (507, "storage-full")
            assert problem_of(api.call("GET", "/readyz", token=None)) == (503, "storage-full")
            db.options = DatabaseOptions()
            assert site.put(round_id, plan_body).status_code == 200

    def test_leaves_no_part_of_a_model_behind(self, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        write, written = os.pwrite, threading.Event()

        def fill(descriptor: int, data: bytes, position: int) -> int:
            if written.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            written.set()
            return write(descriptor, data[:10], position)

        monkeypatch.setattr(os, "pwrite", fill)
        with pytest.raises(ObjectStoreFull, match="is full"):
            blobs.store(db, b"a model of more than ten bytes")
        assert (files(db), unreferenced_blobs(db), count(db, BlobChunk)) == ([], set(), [0])


@contextmanager
def running(db_url: str, folder: Path, address: str) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(db_url, folder, forked=True, DISTRANS_BLOBS=address)
    try:
        yield process
    finally:
        process.stop()


def test_an_upload_can_be_resumed_after_the_coordinator_was_killed(
    sqlite_url: str, spool_address: str, tmp_path: Path
) -> None:
    """After kill -9 in the middle of a PATCH, the next process continues at the recorded byte."""
    plan = large_plan(count=1)
    whole = update_body(plan, {}, 1)
    with running(sqlite_url, tmp_path, spool_address) as first:
        first.create(plan)
        site = first.join(plan, "north", {"cat": 1})
        task = site.task()
        assert task.round is not None
        round_id = task.round.id
        path = f"/v1/rounds/{round_id}/update"
        with RawConnection(first.url) as connection:
            connection.send_head(
                "PATCH",
                path,
                **site.headers,
                Content_Length=len(whole),
                Upload_Offset=0,
                Upload_Length=len(whole),
                Repr_Digest=digest_header(digest(whole)),
            )
            connection.send(whole[: 3 << 20])
            time.sleep(spool._FLUSH_S + 0.5)
            connection.send(whole[3 << 20 : 7 << 20])
            eventually(lambda: offset(site, path) > 0)
            stored = offset(site, path)
            first.kill()
    with running(sqlite_url, tmp_path, spool_address) as second:
        site = Site(second.http, plan, "north", site.token)
        assert offset(site, path) >= stored
        stored = offset(site, path)
        answer = site.patch(round_id, whole[stored:], stored, whole)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(whole))
        site.wait_for_model(1)
        assert digest(encode(site.tensors(f"/v1/federations/{plan.name}/model?round=1"))) == mean_bits([whole])


def offset(site: Site, path: str) -> int:
    return int(site.http.head(path, headers=site.headers).headers["upload-offset"])


def test_a_lost_folder_is_not_mistaken_for_an_empty_one(db: Database, tmp_path: Path) -> None:
    """Its objects are unavailable, not missing: the round that needs them waits."""
    desk = Desk(db)
    desk.upload(desk.join("left"), 1)
    shutil.move(tmp_path / "spool", tmp_path / "unmounted")
    desk.aggregate()
    assert desk.round.state == "aggregating"
    shutil.move(tmp_path / "unmounted", tmp_path / "spool")
    desk.aggregate()
    assert desk.view.rounds_done == 1
