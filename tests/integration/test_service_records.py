"""What the coordinator keeps of a federation, and for how long: evaluations, tensors, old models, the audit log."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import pytest
import safetensors.torch
from sqlalchemy import delete, event, func, select, text
from sqlalchemy.exc import DBAPIError
from support.plans import small_plan
from support.service import (
    MEAN_OFFSETS,
    OPERATOR,
    TINY_NETWORK,
    Clock,
    Desk,
    count,
    fedavg_plan,
    measured,
    refused,
    unreferenced_blobs,
)

from server.core.errors import Conflict, Gone, InvalidInput, NotFound
from server.service import audit, cleaning, enrolment, evaluations, federations, models, reports, tasks
from server.service.cleaning import Cleaner, Retention
from server.service.context import Actor, Context, facts_of, load_roster, record
from server.service.enrolment import Identity
from server.service.housekeeping import Heartbeats
from server.service.models import KEPT_STATES
from server.service.resumable_uploads import UploadPart
from server.store import blobs
from server.store.session import Database
from server.store.tables import Blob, BlobChunk, Personal, Round, Transfer, Update
from shared.evaluation import Evaluation
from shared.methods import server_half
from shared.methods.base import ServerState
from shared.wire import digest


class TestEvaluation:
    @pytest.mark.parametrize(
        "result",
        [
            Evaluation(samples=9, correct=10, loss_sum=1),
            Evaluation(samples=10, correct=5, loss_sum=1, negatives=11),
            Evaluation(samples=10, correct=5, loss_sum=1, negatives=8, negatives_correct=6),
            Evaluation(samples=10, correct=5, loss_sum=1, negatives=4, negatives_correct=3, negatives_as_own=2),
            Evaluation(samples=10, correct=0, loss_sum=1, negatives=4, negatives_as_own=5),
            Evaluation(samples=0, correct=0, loss_sum=1, negatives=1),
        ],
    )
    def test_that_contradicts_itself_is_refused(self, clean_db: Database, result: Evaluation) -> None:
        desk = Desk(clean_db)
        north = desk.join("north")
        refused(InvalidInput, "inconsistent-evaluation", lambda: evaluations.submit(desk.ctx, north, 0, result))

    def test_of_a_model_that_does_not_exist_is_refused(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        north = desk.join("north")
        refused(NotFound, "no-such-model", lambda: evaluations.submit(desk.ctx, north, 1, measured(1)))

    def test_again_replaces_the_first(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        north, south = desk.join("north"), desk.join("south", cat=20, dog=20)
        desk.run_round({north: 1, south: 2})
        evaluations.submit(desk.ctx, north, 1, measured(1))
        evaluations.submit(desk.ctx, north, 1, measured(7))
        evaluations.submit(desk.ctx, south, 1, measured(30, samples=40))
        (first, _) = reports.rounds(desk.ctx, desk.name, None, 0, 10)
        assert first.evaluation is not None
        assert (first.evaluation.samples, first.evaluation.accuracy) == (50, 37 / 50)
        assert first.client_evaluations["north"].accuracy == 0.7
        (first, _) = reports.rounds(desk.ctx, desk.name, south.client_id, 0, 10)
        assert first.client_evaluations.keys() == {"south"}, "a client sees its own"
        assert first.evaluation is None


class TestPersonalTensors:
    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        return Desk(clean_db, small_plan(method=TINY_NETWORK, rounds={"count": 5, "min_clients": 2}))

    @pytest.fixture
    def sites(self, desk: Desk) -> list[Identity]:
        """North and south after one round, so that there is a network that makes their offsets."""
        sites = [desk.join("north", cat=9, dog=1), desk.join("south", cat=2, dog=8)]
        desk.run_round({sites[0]: 1, sites[1]: 2})
        return sites

    @staticmethod
    def expected(desk: Desk, name: str) -> dict[str, list[float]]:
        """What the method says for the open round, from its frozen roster."""
        round_ = desk.rounds()[-1]
        roster = load_roster(round_.roster)
        private = safetensors.torch.load(blobs.read_all(desk.db, desk.models()[-1].private_blob_id or ""))
        (client,) = [record for record in roster if record.id == name]
        tensors = server_half(desk.plan).personal(ServerState({}, private), client, roster, facts_of(round_.facts))
        return {key: value.flatten().tolist() for key, value in tensors.items()}

    @staticmethod
    def stored(desk: Desk, blob: Blob) -> dict[str, list[float]]:
        tensors = safetensors.torch.load(blobs.read_all(desk.db, blob.id))
        return {key: value.flatten().tolist() for key, value in tensors.items()}

    def test_are_made_once_whichever_process_is_asked(self, desk: Desk, sites: list[Identity]) -> None:
        round_id, url = desk.round.id, desk.db.url.render_as_string(hide_password=False)
        others = [Database(url) for _ in range(4)]
        barrier = Barrier(len(others))

        def ask(db: Database) -> tuple[str, str | None]:
            barrier.wait()
            blob = tasks.round_personal(Context(db, desk.clock), sites[0], round_id)
            return blob.id, blob.digest

        with ThreadPoolExecutor(len(others)) as pool:
            answers = set(pool.map(ask, others))
        for db in others:
            db.close()
        blob = tasks.round_personal(desk.ctx, sites[0], round_id)
        assert answers == {(blob.id, blob.digest)}
        assert count(desk.db, Personal) == [1]
        assert unreferenced_blobs(desk.db) == set()
        assert self.stored(desk, blob) == self.expected(desk, "north")

    def test_differ_from_client_to_client(self, desk: Desk, sites: list[Identity]) -> None:
        digests = {tasks.round_personal(desk.ctx, who, desk.round.id).digest for who in sites}
        assert len(digests) == 2

    def test_follow_the_roster_of_the_round(self, desk: Desk, sites: list[Identity]) -> None:
        """New class counts count from the next round on, also for a client that has not asked for its tensors yet."""
        enrolment.update_counts(desk.ctx, sites[0], OPERATOR, {"cat": 1, "dog": 99})
        blob = tasks.round_personal(desk.ctx, sites[0], desk.round.id)
        assert self.stored(desk, blob) == self.expected(desk, "north")

    def test_for_serving_stay_the_same_while_the_model_does(self, desk: Desk, sites: list[Identity]) -> None:
        first = tasks.serving_personal(desk.ctx, sites[0], desk.name, 1)
        desk.restart()
        assert tasks.serving_personal(desk.ctx, sites[0], desk.name, 1).id == first.id

    def test_of_an_old_model_are_gone(self, desk: Desk, sites: list[Identity]) -> None:
        round_id = desk.round.id
        desk.run_round({sites[0]: 3, sites[1]: 4})
        refused(Gone, "model-superseded", lambda: tasks.round_personal(desk.ctx, sites[0], round_id))
        refused(Gone, "model-superseded", lambda: tasks.serving_personal(desk.ctx, sites[0], desk.name, 1))
        refused(NotFound, "no-such-model", lambda: tasks.serving_personal(desk.ctx, sites[0], desk.name, 99))


class TestRetention:
    @staticmethod
    def kept(desk: Desk) -> dict[int, int]:
        """How many updates of each round still have their bytes."""
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
        """Of four rounds the second failed and the last is open: its updates are needed whatever the setting."""
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
            assert str(error) == f"Model {number} is no longer kept; its history is. These are kept: {kept}."
            error = refused(
                Gone, "model-dropped", lambda to=number: models.roll_back(desk.ctx, OPERATOR, desk.name, to)
            )
            assert str(error).endswith(f"Choose one of: {', '.join(map(str, expected[:-1]))}.")
        models.roll_back(desk.ctx, OPERATOR, desk.name, 2)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.run_round({north: 7})

    def test_keeps_a_model_that_was_rolled_back_to(self, clean_db: Database) -> None:
        """It shares its bytes with the newest one; that the rollback counts no round is known without the bytes."""
        desk = Desk(clean_db, small_plan(method=MEAN_OFFSETS, rounds={"count": 9}))
        north = desk.join("north")
        for seed in range(3):
            evaluations.submit(desk.ctx, north, seed, measured(5))
            desk.run_round({north: seed})
        models.roll_back(desk.ctx, OPERATOR, desk.name, 1)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        Cleaner(desk.ctx, Retention(keep_models=1)).clean()
        assert [model.number for model in desk.models() if model.blob_id is not None] == [0, 1, 3, 5]
        for seed in range(2):
            desk.run_round({north: seed})
        Cleaner(desk.ctx, Retention(keep_models=1)).clean()
        assert [model.number for model in desk.models() if model.blob_id is not None] == [0, 6, 7]
        assert unreferenced_blobs(desk.db) == set()
        with desk.db.read() as session:
            federation = federations.load(session, desk.name)
            copies = [number for number in range(8) if models._is_copy(session, federation, number)]
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
        """Housekeeping may run at any time, with any clock, and the round still ends as it should."""
        plan = small_plan(method=MEAN_OFFSETS, rounds={"count": 3, "min_clients": 2, "deadline_s": 30 * 86400})
        runs = []
        for name, careful in (("clean", True), ("plain", False)):
            desk = Desk(clean_db, plan.model_copy(update={"name": name}))
            sites = [desk.join("north"), desk.join("south")]
            for number in range(3):
                for seed, who in enumerate(sites):
                    tasks.round_personal(desk.ctx, who, desk.round.id)
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
            tasks.round_personal(desk.ctx, north, desk.round.id)
            desk.run_round({north: seed})
        tasks.round_personal(desk.ctx, north, desk.round.id)
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
        desk.clock.jump(100 * 86400)  # by this clock it is old; by the process' own it is not
        assert cleaner.clean() == 0
        desk.clock.advance(1)
        assert cleaner.clean() == 1
        with clean_db.read() as session:
            assert session.get(Blob, orphan) is None
        assert len(desk.model(0)) > 0

    def test_removes_everything_in_one_call(self, clean_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        """Storage must not grow because more becomes garbage in half a minute than is looked up at a time."""
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
            blobs.drop(session, blob_id)
        assert (left[0], left[-1]) == (21, 0)
        assert max(before - after for before, after in pairwise(left)) <= 4

    def test_never_removes_a_blob_in_use(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        before = desk.bits(0)
        with clean_db.write() as session:
            blobs.drop(session, desk.models()[0].blob_id)  # a mistake in some use case
        assert desk.bits(0) == before

    def test_waits_for_a_transaction_that_is_about_to_refer_to_a_blob(self, clean_db: Database) -> None:
        if clean_db.is_sqlite:
            return  # it has one writer at a time
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
        """It had been silent for a day when housekeeping looked; its next byte came before it was dropped."""
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
        assert not cleaning._let_go(desk.ctx, blob_id, unlink)
        assert count(clean_db, Transfer) == [1]

    def test_what_was_dropped_is_gone_and_not_empty(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        kept = tasks.federation_model(desk.ctx, desk.name, 0)
        pieces = blobs.read(clean_db, kept.id)
        with clean_db.write() as session:
            session.execute(delete(BlobChunk).where(BlobChunk.blob_id == kept.id))
        for step in (lambda: list(pieces), lambda: blobs.read(clean_db, kept.id, 0, 8)):
            refused(Gone, "tensors-dropped", step)
        orphan = blobs.store(clean_db, b"of no use")
        with clean_db.write() as session:
            blobs.drop(session, orphan)
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


class TestHeartbeats:
    def test_are_written_together_and_never_go_back(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        north, south = desk.join("north"), desk.join("south")
        joined = desk.clock.now
        beats = Heartbeats()
        beats.note(north.client_id, joined + 5)
        beats.note(south.client_id, joined - 5)
        beats.flush(desk.ctx)
        assert enrolment.me(desk.ctx, north).last_seen_at == joined + 5
        assert enrolment.me(desk.ctx, south).last_seen_at == joined
        assert beats.seen == {}


class TestAuditLog:
    def test_tells_who_did_what_from_where(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        north = desk.join("north")
        desk.join("south")
        desk.upload(north, 1)
        enrolment.rotate(desk.ctx, OPERATOR, desk.name, "north")
        enrolment.leave(desk.ctx, north, Actor("client:north", "198.51.100.7"))
        enrolment.revoke(desk.ctx, OPERATOR, desk.name, "south")
        federations.pause(desk.ctx, OPERATOR, desk.name)
        federations.resume(desk.ctx, OPERATOR, desk.name)
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        rows = audit.entries(desk.ctx)
        assert [row.action for row in rows] == [
            "federation.create",
            "federation.start",
            "invite.create",
            "client.join",
            "invite.create",
            "client.join",
            "client.rotate",
            "client.leave",
            "client.revoke",
            "federation.pause",
            "federation.resume",
            "federation.cancel",
        ]
        assert {row.federation for row in rows} == {desk.name}
        assert (rows[0].actor, rows[0].address, rows[0].at) == ("operator", "192.0.2.1", desk.clock.now)
        assert (rows[7].actor, rows[7].address, rows[7].detail) == (
            "client:north",
            "198.51.100.7",
            '{"client": "north"}',
        )

    def test_tells_what_the_coordinator_did_by_itself(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        desk.join("north")
        desk.let_pass(60)
        failed, paused = audit.entries(desk.ctx)[-2:]
        assert (failed.actor, failed.action) == ("coordinator", "round.failed")
        assert '"round": 1' in failed.detail
        assert (paused.actor, paused.action) == ("coordinator", "federation.paused")

    def test_says_nothing_of_what_was_refused(self, clean_db: Database) -> None:
        desk = Desk(clean_db, start=False)
        before = len(audit.entries(desk.ctx))
        refused(Conflict, "wrong-state", lambda: federations.pause(desk.ctx, OPERATOR, desk.name))
        assert len(audit.entries(desk.ctx)) == before

    def test_holds_no_secrets(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        token = desk.join_token("north")
        secret = token.split("_", 2)[2]
        assert all(secret not in row.model_dump_json() for row in audit.entries(desk.ctx))

    def test_is_read_page_by_page(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        desk.join("north")
        rows = audit.entries(desk.ctx)
        assert audit.entries(desk.ctx, after_id=rows[1].id) == rows[2:]
        assert audit.entries(desk.ctx, limit=2) == rows[:2]
        assert list(audit.all_entries(desk.ctx)) == rows
        assert audit.entries(desk.ctx, federation="another") == []

    def test_numbers_entries_in_the_order_of_the_commits(self, clean_db: Database) -> None:
        """A follower that has read up to an id never looks for a smaller one again."""
        if clean_db.is_sqlite:
            return  # it has one writer at a time
        desk = Desk(clean_db)
        last = audit.entries(desk.ctx)[-1].id
        with clean_db.write() as slow:
            record(slow, desk.ctx, OPERATOR, "client.revoke")
            slow.flush()
            with clean_db.write() as quick:
                record(quick, desk.ctx, OPERATOR, "client.rotate")
            first = audit.entries(desk.ctx, after_id=last)
        then = audit.entries(desk.ctx, after_id=first[-1].id)
        assert [[row.action for row in page] for page in (first, then)] == [["client.rotate"], ["client.revoke"]]

    def test_is_followed_without_a_gap_while_many_write(self, clean_db: Database) -> None:
        desk = Desk(clean_db)
        last, seen, over = audit.entries(desk.ctx)[-1].id, [], threading.Event()

        def follow() -> None:
            nonlocal last
            while True:
                is_over = over.is_set()
                page = audit.entries(desk.ctx, after_id=last)
                seen.extend(row.id for row in page)
                last = page[-1].id if page else last
                if is_over and not page:
                    return

        def write(place: int) -> None:
            for number in range(20):
                with clean_db.write() as session:
                    record(session, desk.ctx, OPERATOR, f"test.{place}.{number}")

        with ThreadPoolExecutor(5) as pool:
            following = pool.submit(follow)
            list(pool.map(write, range(4)))
            over.set()
            following.result()
        actions = [row.action for row in audit.entries(desk.ctx, limit=1000) if row.id in set(seen)]
        assert sorted(actions) == sorted(f"test.{place}.{number}" for place in range(4) for number in range(20))

    @pytest.mark.parametrize(
        "statement",
        ["UPDATE audit SET actor = 'nobody'", "DELETE FROM audit", "TRUNCATE audit", "UPDATE audit SET at=0"],
    )
    def test_cannot_be_changed(self, clean_db: Database, statement: str) -> None:
        """Not even by somebody with the coordinator's access to the database."""
        desk = Desk(clean_db)
        before = audit.entries(desk.ctx)
        if clean_db.is_sqlite and statement.startswith("TRUNCATE"):
            return  # SQLite has no such statement
        with pytest.raises(DBAPIError, match="the audit log is append-only"), clean_db.write() as session:
            session.execute(text(statement))
        assert audit.entries(desk.ctx) == before

    def test_cannot_be_written_over(self, clean_db: Database) -> None:
        """SQLite's REPLACE deletes without asking the trigger against deletions; PostgreSQL's form is an UPDATE."""
        desk = Desk(clean_db)
        before = audit.entries(desk.ctx)
        insert = (
            "INSERT INTO audit (id, at, actor, action, federation, address, detail) VALUES (1, 0, '', '', '', '', '')"
        )
        statements = [insert + " ON CONFLICT (id) DO UPDATE SET actor = ''"]
        if clean_db.is_sqlite:
            statements += [insert.replace("INSERT", verb, 1) for verb in ("INSERT OR REPLACE", "REPLACE")]
        for statement in statements:
            with pytest.raises(DBAPIError, match="the audit log is append-only"), clean_db.write() as session:
                session.execute(text(statement))
        assert audit.entries(desk.ctx) == before


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
