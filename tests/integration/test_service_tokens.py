"""Repeated joins, renewed tokens, and revoked invites."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from support.api import Api, open_api, problem_of
from support.coordinator import Site
from support.databases import new_database
from support.desk import OPERATOR, Desk, fedavg_plan, refused
from support.many_rows import statements
from support.plans import small_plan

from server.core.errors import Conflict, NotAllowed, NotAuthenticated, NotFound, TooMany
from server.service import audit, client_tokens, clients, deletion, enrollment, federations, invites, queries, tasks
from server.service.context import Actor
from server.store.database import LOCK, Database
from server.store.tables import Client
from shared.contract.messages import JoinAnswer, JoinRequest

ATTEMPT, ANOTHER = "0a" * 16, "0b" * 16
PLAN = small_plan(method={"name": "fedavg"})
SITE = Actor("client:north", "192.0.2.7")


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, fedavg_plan())


@pytest.fixture
def invite(desk: Desk) -> str:
    return invites.create(desk.ctx, OPERATOR, desk.name, 3600).token


def join(desk: Desk, invite: str, name: str = "north", attempt: str | None = ATTEMPT, cats: int = 5) -> JoinAnswer:
    return enrollment.join(desk.ctx, invite, JoinRequest(name=name, class_counts={"cat": cats}, attempt=attempt))


@contextmanager
def waiting_for(db: Database, lock: Callable[[Session], object], step: Callable[[], object]) -> Iterator[Session]:
    """Run `step` against a transaction holding a lock it needs; when that ends, the step continues and may raise."""
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()")
    with ThreadPoolExecutor(1) as pool:
        with db.write() as session:
            lock(session)
            session.flush()
            started = pool.submit(step)
            while not db.is_sqlite and not session.execute(waiting).scalar_one():  # SQLite allows one writer at a time
                assert not started.done(), started.result()
            yield session
        started.result()


def actions(desk: Desk) -> list[str]:
    return [entry.action for entry in audit.entries(desk.ctx)]


class TestRepeatedJoin:
    def test_gives_the_same_client_a_fresh_token(self, desk: Desk, invite: str) -> None:
        first = join(desk, invite)
        assert enrollment.preview(desk.ctx, invite, ATTEMPT).federation == desk.name
        desk.clock.advance(7200)  # the invite has since expired, but was used in time
        second = join(desk, invite, "north-2", cats=7)
        assert second.client_id == first.client_id
        refused(NotAuthenticated, "invalid-token", lambda: client_tokens.authenticate(desk.ctx, first.token))
        who = client_tokens.authenticate(desk.ctx, second.token)
        view = clients.own_record(desk.ctx, who)
        assert (view.name, view.class_counts) == ("north-2", {"cat": 7, "dog": 0})
        assert [client.name for client in clients.clients_of(desk.ctx, desk.name)] == ["north-2"]
        assert [entry.detail for entry in audit.entries(desk.ctx) if entry.action == "client.join"] == [
            f'{{"id": "{first.client_id}"}}',
            f'{{"id": "{first.client_id}", "repeated": true}}',
        ]

    def test_of_a_site_that_a_round_waits_for_takes_part_in_it(self, desk: Desk, invite: str) -> None:
        """The round opened with the first attempt and knows the client by its old name."""
        join(desk, invite, "north")
        who = client_tokens.authenticate(desk.ctx, join(desk, invite, "south", cats=7).token)
        assert tasks.task(desk.ctx, who).action == "train"
        desk.run_round({who: 1})
        assert (desk.view.state, desk.view.rounds_done) == ("running", 1)

    def test_ends_with_the_first_request_of_the_client(self, desk: Desk, invite: str) -> None:
        client_tokens.authenticate(desk.ctx, join(desk, invite).token)
        refused(NotAllowed, "invite-used", lambda: join(desk, invite))
        refused(NotAllowed, "invite-used", lambda: enrollment.preview(desk.ctx, invite, ATTEMPT))

    @pytest.mark.parametrize("attempt", [ANOTHER, None])
    def test_with_another_attempt_is_refused(self, desk: Desk, invite: str, attempt: str | None) -> None:
        token = join(desk, invite).token
        refused(NotAllowed, "invite-used", lambda: join(desk, invite, attempt=attempt))
        refused(NotAllowed, "invite-used", lambda: enrollment.preview(desk.ctx, invite, attempt))
        assert client_tokens.authenticate(desk.ctx, token).name == "north"

    def test_of_an_agent_that_names_no_attempt_is_refused(self, desk: Desk, invite: str) -> None:
        join(desk, invite, attempt=None)
        for attempt in (None, ATTEMPT):
            refused(NotAllowed, "invite-used", lambda tried=attempt: join(desk, invite, attempt=tried))

    def test_of_a_client_that_was_revoked_is_refused(self, desk: Desk, invite: str) -> None:
        join(desk, invite)
        clients.revoke(desk.ctx, OPERATOR, desk.name, "north")
        refused(NotAllowed, "invite-used", lambda: join(desk, invite))

    def test_is_a_sign_of_life(self, clean_db: Database) -> None:
        """A site that repeats its join after a day counts as present, so a round may start with it."""
        desk = Desk(clean_db, fedavg_plan(min_clients=2), polling=False)
        invite = invites.create(desk.ctx, OPERATOR, desk.name, 3600).token
        join(desk, invite)
        desk.wait(86400)
        join(desk, invite)
        desk.join("south")
        assert desk.round.participants == 2

    def test_waits_for_the_federation_before_its_client(self, desk: Desk, invite: str) -> None:
        """Locks are taken in the same order as by a revocation, or the two would deadlock."""
        client_id = join(desk, invite).client_id

        def lock(session: Session) -> None:
            queries.load_federation(session, desk.name, lock=True)

        with (
            pytest.raises(NotAllowed, match="already been used"),
            waiting_for(desk.db, lock, lambda: join(desk, invite)) as session,
        ):
            session.get_one(Client, client_id, with_for_update=LOCK).state = "revoked"

    def test_of_a_federation_that_is_being_deleted_is_refused(self, desk: Desk, invite: str) -> None:
        def delete(session: Session) -> None:
            queries.load_federation(session, desk.name, lock=True).deleted_at = desk.clock()

        with (
            pytest.raises(NotAuthenticated, match="invite is not valid"),
            waiting_for(desk.db, delete, lambda: join(desk, invite)),
        ):
            pass
        assert deletion.finish(desk.ctx) == 1

    def test_costs_the_requests_that_follow_no_write(self, desk: Desk, invite: str) -> None:
        token = join(desk, invite).token
        client_tokens.authenticate(desk.ctx, token)
        with statements(desk.db) as seen:
            client_tokens.authenticate(desk.ctx, token)
        assert [statement.split()[0] for statement in seen] == ["SELECT"]


class TestRenewedToken:
    @pytest.fixture
    def old(self, desk: Desk, invite: str) -> str:
        return join(desk, invite).token

    def test_ends_the_old_one_when_it_is_first_used(self, desk: Desk, old: str) -> None:
        who = client_tokens.authenticate(desk.ctx, old)
        new = client_tokens.renew(desk.ctx, who, SITE).token
        assert client_tokens.authenticate(desk.ctx, old) == who, "the answer may have been lost"
        assert client_tokens.authenticate(desk.ctx, new) == who
        refused(NotAuthenticated, "invalid-token", lambda: client_tokens.authenticate(desk.ctx, old))
        assert client_tokens.authenticate(desk.ctx, new) == who
        assert actions(desk)[-2:] == ["client.renew", "client.renewed"]

    def test_is_replaced_by_the_next_one(self, desk: Desk, old: str) -> None:
        who = client_tokens.authenticate(desk.ctx, old)
        lost = client_tokens.renew(desk.ctx, who, SITE).token
        new = client_tokens.renew(desk.ctx, who, SITE).token
        refused(NotAuthenticated, "invalid-token", lambda: client_tokens.authenticate(desk.ctx, lost))
        assert client_tokens.authenticate(desk.ctx, new) == who

    def test_interrupts_no_request_under_way(self, desk: Desk, old: str) -> None:
        """An upload that started with the old token still belongs to the same client."""
        who = client_tokens.authenticate(desk.ctx, old)
        client_tokens.authenticate(desk.ctx, client_tokens.renew(desk.ctx, who, SITE).token)
        assert tasks.task(desk.ctx, who).action == "train"
        desk.upload(who, 1)

    def test_is_invalid_after_a_rotation(self, desk: Desk, old: str) -> None:
        who = client_tokens.authenticate(desk.ctx, old)
        pending = client_tokens.renew(desk.ctx, who, SITE).token
        client_tokens.rotate(desk.ctx, OPERATOR, desk.name, "north")
        for token in (old, pending):
            refused(NotAuthenticated, "invalid-token", lambda tried=token: client_tokens.authenticate(desk.ctx, tried))
        refused(NotAuthenticated, "invalid-token", lambda: client_tokens.renew(desk.ctx, who, SITE))

    def test_is_refused_while_the_operator_rotates_the_old_one(self, desk: Desk, old: str) -> None:
        """Otherwise a thief of the old token could keep access."""
        who = client_tokens.authenticate(desk.ctx, old)

        def rotate(session: Session) -> None:
            session.get_one(Client, who.client_id, with_for_update=LOCK).token_generation += 1

        with (
            pytest.raises(NotAuthenticated),
            waiting_for(desk.db, rotate, lambda: client_tokens.renew(desk.ctx, who, SITE)),
        ):
            pass

    def test_is_not_used_up_by_somebody_without_the_certificate(self, desk: Desk, old: str) -> None:
        who = client_tokens.authenticate(desk.ctx, old, certificate="ab" * 32)
        new = client_tokens.renew(desk.ctx, who, SITE).token
        refused(NotAllowed, "wrong-certificate", lambda: client_tokens.authenticate(desk.ctx, new, "cd" * 32))
        refused(NotAllowed, "wrong-certificate", lambda: client_tokens.authenticate(desk.ctx, new))
        assert client_tokens.authenticate(desk.ctx, old, "ab" * 32) == who

    def test_is_not_given_without_bound(self, desk: Desk, old: str) -> None:
        who = client_tokens.authenticate(desk.ctx, old)
        for _ in range(audit.CHANGES_PER_HOUR):
            client_tokens.renew(desk.ctx, who, SITE)
        refused(TooMany, "too-many-changes", lambda: client_tokens.renew(desk.ctx, who, SITE))


class TestInvites:
    def test_are_listed_with_what_became_of_them(self, desk: Desk) -> None:
        used, gone, expired, still_open = (
            invites.create(desk.ctx, OPERATOR, desk.name, hours * 3600, note)
            for hours, note in ((9, "north hospital"), (9, ""), (1, ""), (9, "for later"))
        )
        join(desk, used.token)
        invites.revoke(desk.ctx, OPERATOR, desk.name, gone.id)
        desk.clock.advance(2 * 3600)
        found = {view.id: (view.state, view.used_by, view.note) for view in invites.invites_of(desk.ctx, desk.name)}
        assert found == {
            used.id: ("used", "north", "north hospital"),
            gone.id: ("revoked", None, ""),
            expired.id: ("expired", None, ""),
            still_open.id: ("open", None, "for later"),
        }

    def test_that_are_revoked_let_nobody_in(self, desk: Desk) -> None:
        made = invites.create(desk.ctx, OPERATOR, desk.name, 3600)
        for _ in range(2):
            invites.revoke(desk.ctx, OPERATOR, desk.name, made.id)
        for step in (lambda: enrollment.preview(desk.ctx, made.token), lambda: join(desk, made.token)):
            refused(NotAllowed, "invite-revoked", step)
        assert actions(desk).count("invite.revoke") == 1

    def test_that_were_used_cannot_be_revoked(self, desk: Desk, invite: str) -> None:
        join(desk, invite)
        (view,) = invites.invites_of(desk.ctx, desk.name)
        error = refused(Conflict, "invite-used", lambda: invites.revoke(desk.ctx, OPERATOR, desk.name, view.id))
        assert error.next_step == "To end that client's access: distrans-server client revoke pets north"

    def test_of_another_federation_are_not_found(self, desk: Desk) -> None:
        federations.create(desk.ctx, OPERATOR, fedavg_plan("birds"))
        made = invites.create(desk.ctx, OPERATOR, "birds", 3600)
        refused(NotFound, "no-such-invite", lambda: invites.revoke(desk.ctx, OPERATOR, desk.name, made.id))


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(new_database("sqlite", request, tmp_path_factory.mktemp("tokens"))) as api:
        api.create(PLAN)
        yield api


class TestApi:
    def test_a_join_is_repeated_until_the_client_speaks(self, api: Api) -> None:
        invite = api.admin("POST", "/v1/federations/pets/invites", json={"note": "north"})
        body = {"name": "north", "class_counts": {"cat": 1}, "attempt": ATTEMPT}
        answers = [api.call("POST", "/v1/join", invite["token"], json=body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert answers[0].json()["client_id"] == answers[1].json()["client_id"]
        look = [api.call("GET", "/v1/join", invite["token"], params=params) for params in ({"attempt": ATTEMPT}, {})]
        assert [answer.status_code for answer in look] == [200, 403]
        assert api.call("GET", "/v1/me", answers[0].json()["token"]).status_code == 401
        assert api.call("GET", "/v1/me", answers[1].json()["token"]).status_code == 200
        again = api.call("POST", "/v1/join", invite["token"], json=body)
        assert problem_of(again) == (403, "invite-used")
        assert api.call("POST", "/v1/join", invite["token"], json=body | {"attempt": "short"}).status_code == 403

    def test_a_client_renews_its_token(self, api: Api) -> None:
        site = api.join(PLAN, "south", {"cat": 1})
        new = Site(api.http, PLAN, "south", api.call("POST", "/v1/me/token", site.token).json()["token"])
        assert site.task(0) == new.task(0)
        assert api.call("GET", "/v1/me", site.token).json()["code"] == "invalid-token"
        assert api.call("POST", "/v1/me/token").json()["code"] == "client-only"

    def test_invites_are_listed_and_revoked(self, api: Api) -> None:
        made = api.admin("POST", "/v1/federations/pets/invites", json={"note": "east"})
        path = f"/v1/federations/pets/invites/{made['id']}"
        for _ in range(2):
            assert api.call("DELETE", path).status_code == 204
        found = {view["id"]: view for view in api.admin("GET", "/v1/federations/pets/invites")}
        assert (found[made["id"]]["state"], found[made["id"]]["note"]) == ("revoked", "east")
        assert made["token"] not in api.call("GET", "/v1/federations/pets/invites").text
        assert api.call("DELETE", "/v1/federations/pets/invites/nothing").json()["code"] == "no-such-invite"
        assert api.call("POST", "/v1/federations/pets/invites", json={"note": "a\nb"}).status_code == 422
