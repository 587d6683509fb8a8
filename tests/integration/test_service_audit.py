"""The audit log: complete, in order, and unchangeable."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from support.desk import (
    OPERATOR,
    Desk,
    fedavg_plan,
    refused,
)

from server.core.errors import Conflict
from server.service import audit, client_tokens, clients, federations
from server.service.audit import record_action
from server.service.context import Actor
from server.store.database import Database


class TestAuditLog:
    def test_tells_who_did_what_from_where(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=2))
        north = desk.join("north")
        desk.join("south")
        desk.upload(north, 1)
        client_tokens.rotate(desk.ctx, OPERATOR, desk.name, "north")
        clients.leave(desk.ctx, north, Actor("client:north", "198.51.100.7"))
        clients.revoke(desk.ctx, OPERATOR, desk.name, "south")
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
        """A reader that has read up to an id never looks for smaller ones again."""
        if clean_db.is_sqlite:
            return  # allows one writer at a time
        desk = Desk(clean_db)
        last = audit.entries(desk.ctx)[-1].id
        with clean_db.write() as slow:
            record_action(slow, desk.ctx, OPERATOR, "client.revoke")
            slow.flush()
            with clean_db.write() as quick:
                record_action(quick, desk.ctx, OPERATOR, "client.rotate")
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
                    record_action(session, desk.ctx, OPERATOR, f"test.{place}.{number}")

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
        """Not even with the coordinator's own access to the database."""
        desk = Desk(clean_db)
        before = audit.entries(desk.ctx)
        if clean_db.is_sqlite and statement.startswith("TRUNCATE"):
            return  # not in SQLite
        with pytest.raises(DBAPIError, match="the audit log is append-only"), clean_db.write() as session:
            session.execute(text(statement))
        assert audit.entries(desk.ctx) == before

    def test_cannot_be_written_over(self, clean_db: Database) -> None:
        """SQLite's REPLACE deletes without firing the delete trigger; PostgreSQL's form is an UPDATE."""
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
