"""A deleted federation leaves nothing behind but audit entries, and does not affect any other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import select
from support.agents import AgentThread, digits_plan, enroll, write_digits
from support.api import SocketApi, problem_of
from support.desk import MEAN_OFFSETS, OPERATOR, Desk, count, fedavg_plan, measured, refused, unreferenced_blobs
from support.plans import small_plan

from client_agent.errors import AgentEnded, Ending
from server.core.errors import Conflict, InvalidInput, NotAuthenticated, NotFound
from server.service import audit, client_tokens, deletion, downloads, enrollment, federations, invites, rollback, tasks
from server.service.cleaning import Cleaner
from server.service.context import Context
from server.service.measurements import evaluations
from server.service.retention import Retention
from server.store import blobs
from server.store.database import Database
from server.store.tables import (
    Blob,
    BlobChunk,
    Client,
    Evaluation,
    Federation,
    Invite,
    Model,
    Participant,
    Personal,
    Round,
    Transfer,
    Update,
)
from shared.contract.plan import FederationPlan

TABLES = (
    Federation,
    Client,
    Invite,
    Model,
    Round,
    Participant,
    Update,
    Transfer,
    Evaluation,
    Personal,
    Blob,
    BlobChunk,
)


def busy(db: Database, plan: FederationPlan) -> Desk:
    """A federation cancelled after two rounds and a rollback, with rows in every table except transfers."""
    desk = Desk(db, plan)
    north = desk.join("north")
    invites.create(desk.ctx, OPERATOR, desk.name, 3600)
    for seed in range(2):
        downloads.round_personal(desk.ctx, north, desk.round.id)
        desk.run_round({north: seed})
    evaluations.submit(desk.ctx, north, 1, measured(5))
    rollback.roll_back(desk.ctx, OPERATOR, desk.name, 1)
    federations.cancel(desk.ctx, OPERATOR, desk.name)
    return desk


PLAN = small_plan("gone", method=MEAN_OFFSETS, rounds={"count": 9})


class TestDeletion:
    def test_leaves_nothing_behind_and_frees_the_name(self, clean_db: Database) -> None:
        other = Desk(clean_db, fedavg_plan("stays"))
        south = other.join("south")
        before = count(clean_db, *TABLES)
        desk = busy(clean_db, PLAN)
        assert all(
            now > then
            for now, then, table in zip(count(clean_db, *TABLES), before, TABLES, strict=True)
            if table is not Transfer
        )
        deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        assert [view.name for view in federations.list_all(desk.ctx)] == ["stays"]
        refused(NotFound, "no-such-federation", lambda: federations.show(desk.ctx, desk.name))
        federations.create(desk.ctx, OPERATOR, fedavg_plan(desk.name))  # right away, before the rows are gone
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        assert deletion.finish(desk.ctx) == 2
        assert count(clean_db, *TABLES) == before
        assert unreferenced_blobs(clean_db) == set()
        lines = [(entry.action, entry.actor) for entry in audit.entries(desk.ctx, federation=desk.name)]
        assert lines.count(("federation.delete", "operator")) == 2
        other.run_round({south: 1})
        assert other.view.rounds_done == 1

    def test_that_is_interrupted_is_finished_by_the_cleaner(self, clean_db: Database) -> None:
        desk = busy(clean_db, PLAN)
        deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        stopped = threading.Event()
        stopped.set()
        assert deletion.finish(desk.ctx, stopped) == 0
        Cleaner(desk.ctx, Retention()).clean()
        assert count(clean_db, *TABLES) == [0] * len(TABLES)

    def test_by_two_processes_at_once(self, clean_db: Database) -> None:
        desk = busy(clean_db, PLAN)
        deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(deletion.finish, Context(clean_db)) for _ in range(3)]:
                done.result()
        assert count(clean_db, *TABLES) == [0] * len(TABLES)

    def test_ends_tokens_and_invites_at_once(self, clean_db: Database) -> None:
        desk = Desk(clean_db, PLAN, start=False)
        token = desk.join_token("north")
        who = client_tokens.authenticate(desk.ctx, token)
        invite = invites.create(desk.ctx, OPERATOR, desk.name, 3600).token
        deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        for _ in range(2):
            error = refused(NotAuthenticated, "invalid-token", lambda: client_tokens.authenticate(desk.ctx, token))
            assert "its federation was deleted" in error.message
            refused(NotAuthenticated, "invalid-token", lambda: tasks.task(desk.ctx, who))
            refused(NotAuthenticated, "invalid-invite", lambda: enrollment.preview(desk.ctx, invite))
            deletion.finish(desk.ctx)

    def test_refuses_a_measurement_that_was_on_its_way(self, clean_db: Database) -> None:
        """Its row would refer to a client about to be removed."""
        desk = Desk(clean_db)
        north = desk.join("north")
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        for _ in range(2):
            refused(NotAuthenticated, "invalid-token", lambda: evaluations.submit(desk.ctx, north, 0, measured(5)))
            deletion.finish(desk.ctx)

    def test_is_no_name_that_is_suggested(self, clean_db: Database) -> None:
        desk = Desk(clean_db, start=False)
        deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        error = refused(NotFound, "no-such-federation", lambda: federations.show(desk.ctx, "1-deleted"))
        assert error.message == "There is no federation '1-deleted'."

    @pytest.mark.parametrize("state", ["running", "paused"])
    def test_of_a_federation_under_way_is_refused(self, clean_db: Database, state: str) -> None:
        desk = Desk(clean_db, PLAN)
        if state == "paused":
            federations.pause(desk.ctx, OPERATOR, desk.name)
        error = refused(
            Conflict, "wrong-state", lambda: deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
        )
        assert str(error) == (
            f"Federation 'gone' is {state} and cannot be deleted. "
            "Cancel it first: distrans-server federation cancel gone"
        )

    def test_without_the_name_once_more_is_refused(self, clean_db: Database) -> None:
        desk = Desk(clean_db, PLAN, start=False)
        refused(InvalidInput, "not-confirmed", lambda: deletion.delete_federation(desk.ctx, OPERATOR, "gone", "gon"))
        assert desk.view.state == "created"

    @pytest.mark.parametrize("place", ["bucket", "spool_address"])
    def test_removes_the_objects_too(self, sqlite_url: str, place: str, request: pytest.FixtureRequest) -> None:
        db = Database(sqlite_url, request.getfixturevalue(place))
        try:
            desk = busy(db, PLAN)
            with db.read() as session:
                assert session.execute(select(BlobChunk.object_key)).scalars().all()
            assert db.objects is not None
            deletion.delete_federation(desk.ctx, OPERATOR, desk.name, desk.name)
            deletion.finish(desk.ctx)
            assert [key for keys in db.objects.list_keys() for key in keys] == []
            assert blobs.unreferenced_objects(db) == set()
        finally:
            db.close()


def test_an_agent_of_a_deleted_federation_ends_with_the_reason(sqlite_url: str, tmp_path: Path) -> None:
    """Its long poll ends at once, and the loop with it; the process keeps serving."""
    plan = digits_plan(clients=2)
    with SocketApi(sqlite_url) as api:
        api.create(plan, start=False)
        state = enroll(api, plan, "north", write_digits(tmp_path / "data", ("0", "1"), every=20), tmp_path, api.url)
        with AgentThread(state) as agent:
            agent.wait_for_line("received model 0")
            missing = api.call("DELETE", f"/v1/federations/{plan.name}")
            assert problem_of(missing) == (422, "invalid-request")
            answer = api.call("DELETE", f"/v1/federations/{plan.name}", params={"confirm": plan.name})
            assert answer.status_code == 204
            agent.wait()
        assert isinstance(agent.ended_with, AgentEnded)
        assert agent.ended_with.ending is Ending.INVALID_TOKEN
        assert "its federation was deleted" in agent.ended_with.message
        assert state.load_status().ended is Ending.INVALID_TOKEN, "`status` says so too"
        assert api.call("GET", "/metrics").status_code == 200
