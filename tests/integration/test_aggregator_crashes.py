"""Exactly-once aggregation: processes that die, stall or race at any point end in the same model, published once."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import delete, select
from sqlalchemy.exc import OperationalError
from support.crashes import STAGES, Hook, InterruptibleAggregator, Killed, at, die
from support.databases import KINDS, empty_postgres
from support.desk import (
    MEAN_OFFSETS,
    OPERATOR,
    Desk,
    aggregate_until_idle,
    count,
    fedavg_plan,
    mean_bits,
    put,
    unreferenced_blobs,
)
from support.plans import small_plan

from server.service import federations
from server.service.aggregation import LEASE_S, Aggregator
from server.service.cleaning import Cleaner
from server.service.context import Context, Identity
from server.service.retention import Retention
from server.store import blobs
from server.store.database import Database
from server.store.schema import upgrade
from server.store.tables import BlobChunk, Model, Update

FOLDING = STAGES[:2]
UNPUBLISHED = STAGES[:4]
PLAN = small_plan(method=MEAN_OFFSETS, rounds={"count": 3, "min_clients": 3})


@dataclass
class Scene(Desk):
    """Three sites after a first round, so that the second starts with private server state."""

    sites: list[Identity] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.create:
            self.sites = [self.join(name) for name in ("east", "north", "south")]
            self.run_round(self.seeds(1))

    def seeds(self, number: int) -> dict[Identity, int]:
        """Return the seeds of a round's updates by site."""
        return {who: 10 * number + place for place, who in enumerate(self.sites)}

    def upload_all(self, number: int = 2) -> None:
        """Upload the updates of all sites for a round."""
        for who, seed in self.seeds(number).items():
            self.upload(who, seed)

    def process(self, hook: Hook = lambda _stage: None) -> Aggregator:
        """Return the worker of one more process."""
        return InterruptibleAggregator(Context(self.db, self.clock), hook)

    def outcome(self) -> tuple[object, ...]:
        """Return what must be the same whatever happened during the second round."""
        return self.bits(2), self.private_bits(), [model.number for model in self.models()], self.view.rounds_done


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scene]:
    """A scene in a SQLite file that can be copied: its sites are the same in every copy."""
    file = tmp_path_factory.mktemp("prepared") / "coordinator.db"
    db = Database(f"sqlite:///{file}")
    upgrade(db)
    scene = Scene(db, PLAN)
    db.close()  # so that everything is in one file
    return file, scene


@pytest.fixture(scope="module")
def expected(prepared: tuple[Path, Scene], tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The outcome of two undisturbed rounds on SQLite; PostgreSQL must give the same."""
    scene = copied(prepared, tmp_path_factory.mktemp("undisturbed"))
    scene.upload_all()
    scene.aggregate()
    outcome = scene.outcome()
    scene.db.close()
    return outcome


def copied(prepared: tuple[Path, Scene], folder: Path) -> Scene:
    file, original = prepared
    db = Database(f"sqlite:///{shutil.copy(file, folder / 'copy.db')}")
    return Scene(db, PLAN, create=False, sites=original.sites)


@pytest.fixture(params=KINDS)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if request.param == "sqlite":
        scene = copied(request.getfixturevalue("prepared"), tmp_path)
    else:
        url = request.getfixturevalue("reused_postgres_url")
        empty_postgres(url)
        scene = Scene(Database(url), PLAN)
    yield scene
    scene.db.close()


def at_stages(*stages: str) -> pytest.MarkDecorator:
    """Run each stage on SQLite, and on PostgreSQL the two where its own locks and leases matter."""
    cases = [("sqlite", stage) for stage in stages]
    cases += [("postgresql", stage) for stage in stages if stage in ("after-fold", "before-publish")]
    return pytest.mark.parametrize(("scene", "stage"), cases, indirect=["scene"])


class TestFailedPublication:
    """Publication is retried every half second while the database is busy or full."""

    def test_leaves_no_model_behind(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        def busy(*_: object) -> None:
            raise OperationalError("INSERT", {}, Exception("canceling statement due to lock timeout"))

        scene.upload_all()
        process = scene.process()
        with monkeypatch.context() as patch:
            patch.setattr(InterruptibleAggregator, "_publish", busy)
            for _ in range(3):
                process.step()
            assert unreferenced_blobs(scene.db) == set()
            assert scene.round.state == "aggregating"
        aggregate_until_idle(process)
        assert scene.view.rounds_done == 2

    def test_leaves_no_part_of_a_model_behind(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OperationalError("UPDATE", {}, Exception("database or disk is full"))

        monkeypatch.setattr(blobs, "seal", full)
        monkeypatch.setattr(blobs, "CHUNK_BYTES", 10)
        with pytest.raises(OperationalError):
            blobs.store(scene.db, bytes(100))
        assert unreferenced_blobs(scene.db) == set()

    def test_keeps_a_stored_model_when_the_cleaner_has_a_fast_clock(self, scene: Scene) -> None:
        """It is not referenced yet, and would look old to a wall clock that is a day ahead."""
        scene.upload_all()
        cleaner = Cleaner(scene.ctx, Retention(keep_round_uploads=99))

        def clean_ahead() -> None:
            scene.clock.jump(86400)
            cleaner.clean()

        aggregate_until_idle(scene.process(at("before-publish", clean_ahead)))
        assert scene.view.rounds_done == 2


class TestDeath:
    @at_stages(*UNPUBLISHED)
    def test_is_repaired_by_another_process_when_the_lease_expires(
        self, scene: Scene, expected: tuple[object, ...], stage: str
    ) -> None:
        scene.upload_all()
        with pytest.raises(Killed):
            aggregate_until_idle(scene.process(at(stage, die)))
        other = scene.process()
        scene.wait(LEASE_S)
        assert not other.step(), "the lease still holds"
        assert (scene.round.state, count(scene.db, Model)) == ("aggregating", [2])
        scene.wait(1)
        aggregate_until_idle(other)
        assert scene.outcome() == expected
        self.leaves_only_garbage(scene)

    @staticmethod
    def leaves_only_garbage(scene: Scene) -> None:
        """Check that the cleaner removes what the dead process left, and nothing else."""
        Cleaner(scene.ctx, Retention(keep_round_uploads=99, garbage_s=0)).clean()
        assert unreferenced_blobs(scene.db) == set()
        assert count(scene.db, Update) == [6]

    def test_right_after_publishing_changes_nothing(self, scene: Scene, expected: tuple[object, ...]) -> None:
        scene.upload_all()
        with pytest.raises(Killed):
            aggregate_until_idle(scene.process(at("after-publish", die)))
        assert scene.outcome() == expected
        aggregate_until_idle(scene.process())
        assert scene.outcome() == expected
        assert scene.round.number == 3
        assert unreferenced_blobs(scene.db) == set()

    @at_stages(*FOLDING)
    @pytest.mark.parametrize("times", [1, 2])
    def test_before_the_last_update_loses_none(
        self, scene: Scene, expected: tuple[object, ...], stage: str, times: int
    ) -> None:
        """The first process folds two of three updates and dies; the next one starts over."""
        seeds = scene.seeds(2)
        for who in scene.sites[:2]:
            scene.upload(who, seeds[who])
        with pytest.raises(Killed):
            aggregate_until_idle(scene.process(at(stage, die, times)))
        scene.wait(LEASE_S + 1)
        other = scene.process()
        assert other.step()
        scene.upload(scene.sites[2], seeds[scene.sites[2]])
        aggregate_until_idle(other)
        assert scene.outcome() == expected

    def test_at_every_stage_in_turn_still_ends_in_the_same_model(
        self, scene: Scene, expected: tuple[object, ...]
    ) -> None:
        scene.upload_all()
        for stage in UNPUBLISHED:
            with pytest.raises(Killed):
                aggregate_until_idle(scene.process(at(stage, die)))
            scene.wait(LEASE_S + 1)
        aggregate_until_idle(scene.process())
        assert scene.outcome() == expected
        self.leaves_only_garbage(scene)

    def test_does_not_keep_the_same_process_id_waiting(self, scene: Scene, expected: tuple[object, ...]) -> None:
        """A worker that failed and tries again still owns its lease."""
        scene.upload_all()
        ctx = Context(scene.db, scene.clock)
        with pytest.raises(Killed):
            aggregate_until_idle(InterruptibleAggregator(ctx, at("before-store", die)))
        aggregate_until_idle(Aggregator(ctx))
        assert scene.outcome() == expected


class TestStall:
    """A process that was merely slow resumes after another has done its work."""

    @at_stages(*STAGES)
    def test_past_the_lease_does_not_change_the_published_model(
        self, scene: Scene, expected: tuple[object, ...], stage: str
    ) -> None:
        scene.upload_all()

        def meanwhile() -> None:
            scene.wait(LEASE_S + 1)
            aggregate_until_idle(scene.process())
            assert scene.outcome() == expected

        slow = scene.process(at(stage, meanwhile))
        aggregate_until_idle(slow)
        assert scene.outcome() == expected
        assert scene.round.number == 3
        assert unreferenced_blobs(scene.db) == set()
        scene.upload_all(3)
        aggregate_until_idle(slow)  # for the next round it is a process like any other
        assert (scene.view.state, scene.view.rounds_done) == ("finished", 3)

    @at_stages(*UNPUBLISHED)
    def test_does_not_publish_while_another_holds_the_lease(
        self, scene: Scene, expected: tuple[object, ...], stage: str
    ) -> None:
        scene.upload_all()

        def another_takes_over_and_dies() -> None:
            scene.wait(LEASE_S + 1)
            with pytest.raises(Killed):
                aggregate_until_idle(scene.process(at("before-publish", die)))

        slow = scene.process(at(stage, another_takes_over_and_dies))
        aggregate_until_idle(slow)
        assert (scene.round.state, count(scene.db, Model)) == ("aggregating", [2])
        scene.wait(LEASE_S + 1)
        aggregate_until_idle(slow)
        assert scene.outcome() == expected

    @at_stages(*UNPUBLISHED)
    def test_past_the_end_of_the_federation_publishes_nothing(self, scene: Scene, stage: str) -> None:
        scene.upload_all()
        cancel = at(stage, lambda: federations.cancel(scene.ctx, OPERATOR, scene.name))
        aggregate_until_idle(scene.process(cancel))
        assert (scene.view.state, count(scene.db, Model)) == ("cancelled", [2])
        assert [row.state for row in scene.rounds()] == ["done", "failed"]
        assert unreferenced_blobs(scene.db) == set()

    @at_stages(*UNPUBLISHED)
    def test_past_a_pause_publishes_but_opens_no_round(
        self, scene: Scene, expected: tuple[object, ...], stage: str
    ) -> None:
        scene.upload_all()
        aggregate_until_idle(scene.process(at(stage, lambda: federations.pause(scene.ctx, OPERATOR, scene.name))))
        assert scene.outcome() == expected
        assert (scene.view.state, scene.view.round) == ("paused", None)

    def test_of_the_database_is_tried_again(self, scene: Scene, expected: tuple[object, ...]) -> None:
        scene.upload_all()

        def away() -> None:
            raise OperationalError("SELECT 1", {}, Exception("the server closed the connection"))

        for stage in UNPUBLISHED:
            assert not scene.process(at(stage, away)).step()
            assert scene.round.state == "aggregating"
            scene.wait(LEASE_S + 1)
        aggregate_until_idle(scene.process())
        assert scene.outcome() == expected


class TestTurns:
    def test_an_idle_lease_is_taken_over_by_whoever_is_there(self, scene: Scene, expected: tuple[object, ...]) -> None:
        """Two processes take turns folding, each from its own memory; neither counts an update twice."""
        seeds = scene.seeds(2)
        first, second = scene.process(), scene.process()
        federations.pause(scene.ctx, OPERATOR, scene.name)  # no deadline passes while leases expire
        for place, (owner, other) in enumerate([(first, second), (second, first), (first, second)]):
            scene.upload(scene.sites[place], seeds[scene.sites[place]])
            assert owner.step()
            assert not other.step()
            scene.wait(LEASE_S + 1)
        aggregate_until_idle(second)
        assert scene.outcome() == expected

    def test_without_updates_there_is_nothing_to_do(self, scene: Scene) -> None:
        assert not scene.process().step()
        assert scene.rounds()[-1].lease_owner is None

    def test_a_federation_does_not_wait_for_the_lease_of_another(self, clean_db: Database) -> None:
        desks = [Desk(clean_db, fedavg_plan(name)) for name in ("cats", "dogs")]
        for seed, desk in enumerate(desks):
            desk.upload(desk.join("north"), seed)
        with pytest.raises(Killed):
            aggregate_until_idle(InterruptibleAggregator(desks[0].ctx, at("before-publish", die)))
        aggregate_until_idle(Aggregator(desks[1].ctx))
        assert [desk.view.rounds_done for desk in desks] == [0, 1]


class TestDamage:
    def test_of_stored_bytes_fails_the_round_with_a_reason(self, scene: Scene) -> None:
        """Stored bytes that are unreadable, as after a disk error, fail the round with a reason."""
        scene.upload_all()
        with scene.db.write() as session:
            damaged = select(Update.blob_id).where(Update.client_id == scene.sites[1].client_id)
            session.execute(
                delete(BlobChunk).where(BlobChunk.blob_id.in_(damaged.where(Update.round_id == scene.round.id)))
            )
        scene.aggregate()
        assert scene.view.state == "paused"
        assert scene.view.reason.startswith(
            "round 2 failed: aggregation failed; Gone: These tensors have been deleted."
        )
        assert [(row.state, row.closed_at) for row in scene.rounds()][1:] == [("failed", scene.clock.now)]
        federations.resume(scene.ctx, OPERATOR, scene.name)
        assert (scene.round.number, scene.rounds()[-1].base_model) == (3, 1)
        scene.upload_all(3)
        scene.aggregate()
        assert [model.number for model in scene.models()] == [0, 1, 3]


@pytest.fixture
def processes(clean_db: Database) -> Iterator[list[Database]]:
    """Connections of two processes to one database."""
    url = clean_db.url.render_as_string(hide_password=False)
    with ExitStack() as stack:
        databases = [Database(url) for _ in range(2)]
        for database in databases:
            stack.callback(database.close)
        yield databases


def test_two_processes_publish_each_model_once(clean_db: Database, processes: list[Database]) -> None:
    """Both poll constantly, and sites upload through either of them."""
    rounds = 8
    desk = Desk(clean_db, fedavg_plan(min_clients=2, count=rounds))
    sites = [desk.join("north"), desk.join("south")]
    contexts = [Context(db, desk.clock) for db in processes]
    aggregators = [Aggregator(ctx) for ctx in contexts]
    expected = []
    with ThreadPoolExecutor(2) as pool:
        for number in range(1, rounds + 1):
            bodies, round_id, start = [desk.body(2 * number), desk.body(2 * number + 1)], desk.round.id, Barrier(2)

            def work(place: int) -> None:
                start.wait()  # noqa: B023 - the loop waits for the threads
                put(contexts[place], sites[place], round_id, bodies[place])  # noqa: B023
                while federations.show(contexts[place], desk.name).rounds_done < number:  # noqa: B023
                    aggregators[place].step()

            list(pool.map(work, range(2)))
            expected.append(mean_bits(bodies))
    assert [desk.bits(number) for number in range(1, rounds + 1)] == expected
    assert [model.number for model in desk.models()] == list(range(rounds + 1))
    assert [(row.number, row.state) for row in desk.rounds()] == [(number, "done") for number in range(1, rounds + 1)]
    assert (desk.view.state, desk.view.rounds_done) == ("finished", rounds)
    assert unreferenced_blobs(clean_db) == set()
