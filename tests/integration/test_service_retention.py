"""What the coordinator keeps, and what it removes: uploads, models, personal tensors, garbage."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from sqlalchemy import delete, event, func, select, text
from support.api import Api, open_api
from support.desk import (
    MEAN_OFFSETS,
    OPERATOR,
    Clock,
    Desk,
    count,
    fedavg_plan,
    measured,
    refused,
    unreferenced_blobs,
)
from support.plans import small_plan, update_body
from support.waiting import eventually

from server.core.errors import Gone
from server.service import best_model, cleaning, downloads, federations, queries, rollback
from server.service.cleaning import Cleaner
from server.service.measurements import evaluations, reports
from server.service.retention import KEPT_STATES, Retention
from server.service.uploads.resumable import UploadPart
from server.store import blobs
from server.store.database import Database
from server.store.tables import Blob, BlobChunk, Personal, Round, Transfer, Update
from shared.tensors.wire import digest


class TestRetention:
    @staticmethod
    def kept(desk: Desk) -> dict[int, int]:
        """Return how many updates of each round still have their bytes."""
        with desk.db.read() as session:
            query = select(Round.number, Update.blob_id).join(Update, Update.round_id == Round.id)
            rows = session.execute(query.order_by(Round.number)).all()
        kept = dict.fromkeys([number for number, _ in rows], 0)
        for number, blob_id in rows:
            kept[number] += blob_id is not None
        return kept

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            (0, {1: 0, 2: 0, 3: 0, 4: 1}),
            (1, {1: 0, 2: 0, 3: 2, 4: 1}),
            (2, {1: 0, 2: 1, 3: 2, 4: 1}),
            (99, {1: 2, 2: 1, 3: 2, 4: 1}),
        ],
    )
    def test_keeps_the_uploads_of_the_newest_finished_rounds(
        self, clean_db: Database, keep: int, expected: dict[int, int]
    ) -> None:
        """Of four rounds, the second failed and the last is open: its updates stay whatever the setting."""
        desk = Desk(clean_db, fedavg_plan(min_clients=2, count=9))
        sites = [desk.join("north"), desk.join("south")]
        desk.run_round({sites[0]: 1, sites[1]: 2})
        desk.upload(sites[0], 3)
        desk.let_pass(60)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.run_round({sites[0]: 4, sites[1]: 5})
        desk.upload(sites[0], 6)
        Cleaner(desk.ctx, Retention(keep_round_uploads=keep)).clean()
        assert self.kept(desk) == expected
        assert unreferenced_blobs(desk.db) == set()
        assert [model.number for model in desk.models()] == [0, 1, 3]
        assert [len(row.uploads) for row in reports.rounds(desk.ctx, desk.name, None, 0, 10)] == [2, 1, 2, 1]

    @pytest.mark.parametrize(
        ("keep", "expected"),
        [(0, [0, 1, 2, 3, 4, 5, 6]), (1, [0, 2, 5, 6]), (3, [0, 2, 4, 5, 6]), (99, list(range(7)))],
    )
    def test_keeps_the_newest_models_the_first_and_the_best(
        self, clean_db: Database, keep: int, expected: list[int]
    ) -> None:
        desk = Desk(clean_db, fedavg_plan(count=9))
        north = desk.join("north")
        for number in range(6):
            evaluations.submit(desk.ctx, north, number, measured(9 if number == 2 else 5))
            desk.run_round({north: number})
        bits = {number: desk.bits(number) for number in expected}
        Cleaner(desk.ctx, Retention(keep_models=keep)).clean()
        assert [model.number for model in desk.models() if model.blob_id is not None] == expected
        assert {number: desk.bits(number) for number in expected} == bits
        assert unreferenced_blobs(desk.db) == set()
        assert len(reports.rounds(desk.ctx, desk.name, None, 0, 10)) == 7, "the history stays"
        for number in sorted(set(range(7)) - set(expected)):
            error = refused(Gone, "model-dropped", lambda wanted=number: desk.model(wanted))
            kept = ", ".join(map(str, expected))
            assert str(error) == f"Model {number} was deleted; its history remains. Still available: {kept}."
            error = refused(
                Gone, "model-dropped", lambda to=number: rollback.roll_back(desk.ctx, OPERATOR, desk.name, to)
            )
            assert str(error).endswith(f"Choose one of: {', '.join(map(str, expected[:-1]))}.")
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 2)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.run_round({north: 7})

    def test_keeps_a_model_that_was_rolled_back_to(self, clean_db: Database) -> None:
        """It shares its bytes with the newest one. That a rollback is not a round is known without the bytes."""
        desk = Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 9}))
        north = desk.join("north")
        for seed in range(3):
            evaluations.submit(desk.ctx, north, seed, measured(5))
            desk.run_round({north: seed})
        rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        Cleaner(desk.ctx, Retention(keep_models=1)).clean()
        assert [model.number for model in desk.models() if model.blob_id is not None] == [0, 1, 3, 5]
        for seed in range(2):
            desk.run_round({north: seed})
        Cleaner(desk.ctx, Retention(keep_models=1)).clean()
        assert [model.number for model in desk.models() if model.blob_id is not None] == [0, 6, 7]
        assert unreferenced_blobs(desk.db) == set()
        with desk.db.read() as session:
            federation = queries.load_federation(session, desk.name)
            copies = [number for number in range(8) if best_model._is_copy(session, federation, number)]
        assert copies == [5]

    def test_counts_the_rounds_of_each_federation_by_themselves(self, clean_db: Database) -> None:
        clock = Clock()
        desks = [Desk(clean_db, fedavg_plan(name), clock) for name in ("cats", "dogs")]
        for desk in desks:
            north = desk.join("north")
            for seed in range(2):
                desk.run_round({north: seed})
        Cleaner(desks[0].ctx, Retention(keep_round_uploads=1)).clean()
        with clean_db.read() as session:
            query = select(Round.number).join(Update).where(Update.blob_id.is_not(None))
            assert list(session.execute(query).scalars()) == [2, 2]

    def test_keeps_everything_that_a_round_under_way_needs(self, clean_db: Database) -> None:
        """Cleaning may run at any time, with any clock, without changing the result of a round."""
        plan = small_plan(method=MEAN_OFFSETS, rounds={"count": 3, "min_clients": 2, "deadline_s": 30 * 86400})
        runs = []
        for name, careful in (("clean", True), ("plain", False)):
            desk = Desk(clean_db, plan.model_copy(update={"name": name}))
            sites = [desk.join("north"), desk.join("south")]
            for number in range(3):
                for seed, who in enumerate(sites):
                    downloads.round_personal(desk.ctx, who, desk.round.id)
                    desk.upload(who, 10 * number + seed)
                    if careful:
                        desk.wait(2 * 86400)
                        while Cleaner(desk.ctx, Retention(keep_round_uploads=0)).clean():
                            pass
                desk.aggregate()
            runs.append((desk.bits(3), desk.private_bits()))
        assert runs[0] == runs[1]

    def test_drops_personal_tensors_of_models_long_gone(self, clean_db: Database) -> None:
        desk = Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 9}))
        north = desk.join("north")
        for seed in range(3):
            downloads.round_personal(desk.ctx, north, desk.round.id)
            desk.run_round({north: seed})
        downloads.round_personal(desk.ctx, north, desk.round.id)
        Cleaner(desk.ctx, Retention()).clean()
        with clean_db.read() as session:
            assert sorted(session.execute(select(Personal.model_number)).scalars()) == [2, 3]
        assert unreferenced_blobs(desk.db) == set()

    def test_collects_what_a_crash_left_behind(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        orphan = blobs.store(clean_db, b"written by a process that died")
        cleaner = Cleaner(desk.ctx, Retention(garbage_s=3600))
        assert cleaner.clean() == 0
        desk.clock.advance(3599)
        desk.clock.jump(100 * 86400)  # old by this clock, but not by the process's own
        assert cleaner.clean() == 0
        desk.clock.advance(1)
        assert cleaner.clean() == 1
        with clean_db.read() as session:
            assert session.get(Blob, orphan) is None
        assert len(desk.model(0)) > 0

    def test_removes_everything_in_one_call(self, clean_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        """Storage must not grow when more garbage appears in half a minute than one lookup returns."""
        monkeypatch.setattr(cleaning, "_BATCH", 7)
        desk = Desk(clean_db, fedavg_plan())
        north = desk.join("north")
        for seed in (1, 2):
            desk.run_round({north: seed})
        blob_ids = [f"{number:032x}" for number in range(60)]
        with clean_db.write() as session:
            session.add_all(Blob(id=blob_id, size_bytes=1) for blob_id in blob_ids)
            session.flush()
            session.add_all(BlobChunk(blob_id=blob_id, start=0, size_bytes=1, data=b"x") for blob_id in blob_ids)
            session.add_all(
                Personal(
                    federation_id=north.federation_id,
                    model_number=0,
                    round_id=1000 + place,
                    client_id=north.client_id,
                    blob_id=blob_id,
                )
                for place, blob_id in enumerate(blob_ids)
            )
        assert Cleaner(desk.ctx, Retention(keep_round_uploads=9)).clean() == 60
        assert unreferenced_blobs(clean_db) == set()

    def test_removes_a_large_blob_in_short_transactions(
        self, clean_db: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(blobs, "CHUNK_BYTES", 10)
        blob_id = blobs.store(clean_db, bytes(205))
        left = [count(clean_db, BlobChunk)[0]]
        chunks = select(func.count()).select_from(BlobChunk)
        event.listen(clean_db.engine, "commit", lambda connection: left.append(connection.scalar(chunks)))
        with clean_db.write() as session:
            blobs.remove_in(session, blob_id)
        assert (left[0], left[-1]) == (21, 0)
        assert max(before - after for before, after in pairwise(left)) <= 4

    def test_never_removes_a_blob_in_use(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        before = desk.bits(0)
        with clean_db.write() as session:
            blobs.remove_in(session, desk.models()[0].blob_id)  # as a buggy use case might
        assert desk.bits(0) == before

    def test_waits_for_a_transaction_that_is_about_to_refer_to_a_blob(self, clean_db: Database) -> None:
        if clean_db.is_sqlite:
            return  # allows one writer at a time
        desk = Desk(clean_db)
        blob_id = blobs.store(clean_db, b"late, but needed")
        waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()")
        with ThreadPoolExecutor(1) as pool:
            with clean_db.write() as session:
                session.merge(desk.models()[0]).private_blob_id = blob_id
                session.flush()
                removing = pool.submit(blobs.remove, clean_db, blob_id)
                while not session.execute(waiting).scalar_one():
                    assert not removing.done()
            removing.result()
        assert blobs.read_all(clean_db, blob_id) == b"late, but needed"

    def test_ends_early_when_the_process_stops(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        orphans = {blobs.store(clean_db, b"garbage") for _ in range(3)}
        stop = threading.Event()
        stop.set()
        assert Cleaner(desk.ctx, Retention(garbage_s=0), stop).clean() == 0
        assert unreferenced_blobs(clean_db) == orphans

    def test_keeps_a_transfer_that_grew_after_it_was_looked_up(self, clean_db: Database) -> None:
        """It had been silent for a day when the cleaner found it; its next byte arrived before it was removed."""
        desk = Desk(clean_db, fedavg_plan(min_clients=2, deadline_s=7 * 86400))
        north = desk.join("north")
        desk.join("south")
        body = desk.body(1)
        for begin in (0, 100):
            part = UploadPart(desk.ctx, north, desk.round.id, begin, len(body), digest(body))
            desk.wait(25 * 3600)
            found = cleaning._expired_transfers(desk.ctx, Retention())
            part.feed(body[begin : begin + 100])
        ((blob_id, unlink),) = found
        assert not cleaning._remove_with_reference(desk.ctx, blob_id, unlink)
        assert count(clean_db, Transfer) == [1]

    def test_what_was_dropped_is_gone_and_not_empty(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        kept = downloads.federation_model(desk.ctx, desk.name, 0)
        pieces = blobs.read(clean_db, kept.id)
        with clean_db.write() as session:
            session.execute(delete(BlobChunk).where(BlobChunk.blob_id == kept.id))
        for step in (lambda: list(pieces), lambda: blobs.read(clean_db, kept.id, 0, 8)):
            refused(Gone, "tensors-dropped", step)
        orphan = blobs.store(clean_db, b"of no use")
        with clean_db.write() as session:
            blobs.remove_in(session, orphan)
        for blob_id in (orphan, ""):
            refused(Gone, "tensors-dropped", lambda: blobs.read(clean_db, blob_id))  # noqa: B023

    def test_only_the_newest_models_keep_private_state(self, clean_db: Database) -> None:
        desk = Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 9}))
        north = desk.join("north")
        for seed in range(KEPT_STATES + 2):
            desk.run_round({north: seed})
        kept = [model.private_blob_id is not None for model in desk.models()]
        assert kept == [False, False, False] + [True] * KEPT_STATES
        assert [model.private_dropped for model in desk.models()] == [False, True, True] + [False] * KEPT_STATES
        assert unreferenced_blobs(desk.db) == set()


def test_transfers_of_ended_rounds_do_not_pile_up(clean_db: Database) -> None:
    desk = Desk(clean_db, fedavg_plan(min_clients=2, quorum=0.5))
    sites = [desk.join("north"), desk.join("south")]
    body = desk.body(1)
    for _ in range(3):
        part = UploadPart(desk.ctx, sites[1], desk.round.id, 0, len(body), "0" * 64)
        part.feed(body[:100])
        desk.upload(sites[0], 1)
        desk.let_pass(60)
        desk.aggregate()
        assert count(clean_db, Transfer) == [1]
        Cleaner(desk.ctx, Retention()).clean()
        assert count(clean_db, Transfer) == [0]


def test_the_bytes_kept_are_shown_to_the_operator_only(clean_db: Database) -> None:
    desk = Desk(clean_db)
    north = desk.join("north")
    body = desk.body(1)
    with clean_db.read() as session:
        model_bytes = session.execute(select(Blob.size_bytes)).scalar_one()
    assert desk.view.stored_bytes == model_bytes
    part = UploadPart(desk.ctx, north, desk.round.id, 0, len(body), digest(body))
    part.feed(body[:1000])
    assert desk.view.stored_bytes == model_bytes + 1000
    part.feed(body[1000:])
    part.finish()
    desk.aggregate()
    assert desk.view.stored_bytes == sum(blobs_in(clean_db))
    Cleaner(desk.ctx, Retention(keep_round_uploads=0)).clean()
    assert desk.view.stored_bytes == sum(blobs_in(clean_db))
    assert len(blobs_in(clean_db)) == 2
    assert federations.show(desk.ctx, desk.name, north.client_id).stored_bytes is None


def blobs_in(db: Database) -> list[int]:
    with db.read() as session:
        return list(session.execute(select(Blob.size_bytes)).scalars())


def test_uploads_are_removed_as_soon_as_they_are_old(sqlite_url: str) -> None:
    """Not at the next regular cleaning: by then, fast rounds would have filled the disk."""
    with open_api(sqlite_url, retention=Retention(keep_round_uploads=0)) as api:
        plan = fedavg_plan(min_clients=1, count=9)
        api.create(plan)
        site = api.join(plan, "north", {"cat": 1})
        for number in range(1, 4):
            round_id = site.task().round.id
            assert site.put(round_id, update_body(plan, {}, number)).status_code == 200
            site.wait_for_model(number)
            eventually(lambda: uploads_kept(api) == 0, timeout_s=15)


def uploads_kept(api: Api) -> int:
    with api.app.state.ctx.db.read() as session:
        kept = select(func.count()).select_from(Update).where(Update.blob_id.is_not(None))
        return int(session.execute(kept).scalar_one())
