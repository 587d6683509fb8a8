"""Joins that are repeated, tokens that are renewed, and invites that an operator takes back."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from support.api import Api, new_database, open_api
from support.coordinator import Site
from support.many_rows import statements
from support.plans import small_plan
from support.service import OPERATOR, Desk, fedavg_plan, refused

from server.core.errors import Conflict, NotAllowed, NotAuthenticated, NotFound, TooMany
from server.service import audit, deletion, enrolment, federations, invites, tasks
from server.service.context import Actor
from server.store.session import LOCK, Database
from server.store.tables import Client
from shared.schemas import JoinAnswer, JoinRequest

ATTEMPT, ANOTHER = "0a" * 16, "0b" * 16
PLAN = small_plan(method={"name": "fedavg"})
SITE = Actor("client:north", "192.0.2.7")


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, fedavg_plan())


@pytest.fixture
def invite(desk: Desk) -> str:
    return enrolment.invite(desk.ctx, OPERATOR, desk.name, 3600).token


def join(desk: Desk, invite: str, name: str = "north", attempt: str | None = ATTEMPT, cats: int = 5) -> JoinAnswer:
    return enrolment.join(desk.ctx, invite, JoinRequest(name=name, class_counts={"cat": cats}, attempt=attempt))


@contextmanager
def waiting_for(db: Database, lock: Callable[[Session], object], step: Callable[[], object]) -> Iterator[Session]:
    """A transaction that has locked something `step` waits for; after its end the step goes on, and may raise."""
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()")
    with ThreadPoolExecutor(1) as pool:
        with db.write() as session:
            lock(session)
            session.flush()
            started = pool.submit(step)
            while not db.is_sqlite and not session.execute(waiting).scalar_one():  # SQLite has one writer at a time
                assert not started.done(), started.result()
            yield session
        started.result()


def actions(desk: Desk) -> list[str]:
    return [entry.action for entry in audit.entries(desk.ctx)]


class TestRepeatedJoin:
    def test_gives_the_same_client_a_fresh_token(self, desk: Desk, invite: str) -> None:
        first = join(desk, invite)
        assert enrolment.preview(desk.ctx, invite, ATTEMPT).federation == desk.name
        desk.clock.advance(7200)  # the invite has expired since, but it was used in time
        second = join(desk, invite, "north-2", cats=7)
        assert second.client_id == first.client_id
        refused(NotAuthenticated, "invalid-token", lambda: enrolment.authenticate(desk.ctx, first.token))
        who = enrolment.authenticate(desk.ctx, second.token)
        view = enrolment.me(desk.ctx, who)
        assert (view.name, view.class_counts) == ("north-2", {"cat": 7, "dog": 0})
        assert [client.name for client in enrolment.clients_of(desk.ctx, desk.name)] == ["north-2"]
        assert [entry.detail for entry in audit.entries(desk.ctx) if entry.action == "client.join"] == [
            f'{{"id": "{first.client_id}"}}',
            f'{{"id": "{first.client_id}", "repeated": true}}',
        ]

    def test_of_a_site_that_a_round_waits_for_takes_part_in_it(self, desk: Desk, invite: str) -> None:
        """The round opened with the first attempt and knows the client by a name that it no longer has."""
        join(desk, invite, "north")
        who = enrolment.authenticate(desk.ctx, join(desk, invite, "south", cats=7).token)
        assert tasks.task(desk.ctx, who).action == "train"
        desk.run_round({who: 1})
        assert (desk.view.state, desk.view.rounds_done) == ("running", 1)

    def test_ends_with_the_first_request_of_the_client(self, desk: Desk, invite: str) -> None:
        enrolment.authenticate(desk.ctx, join(desk, invite).token)
        refused(NotAllowed, "invite-used", lambda: join(desk, invite))
        refused(NotAllowed, "invite-used", lambda: enrolment.preview(desk.ctx, invite, ATTEMPT))

    @pytest.mark.parametrize("attempt", [ANOTHER, None])
    def test_with_another_attempt_is_refused(self, desk: Desk, invite: str, attempt: str | None) -> None:
        token = join(desk, invite).token
        refused(NotAllowed, "invite-used", lambda: join(desk, invite, attempt=attempt))
        refused(NotAllowed, "invite-used", lambda: enrolment.preview(desk.ctx, invite, attempt))
        assert enrolment.authenticate(desk.ctx, token).name == "north"

    def test_of_an_agent_that_names_no_attempt_is_refused(self, desk: Desk, invite: str) -> None:
        join(desk, invite, attempt=None)
        for attempt in (None, ATTEMPT):
            refused(NotAllowed, "invite-used", lambda tried=attempt: join(desk, invite, attempt=tried))

    def test_of_a_client_that_was_revoked_is_refused(self, desk: Desk, invite: str) -> None:
        join(desk, invite)
        enrolment.revoke(desk.ctx, OPERATOR, desk.name, "north")
        refused(NotAllowed, "invite-used", lambda: join(desk, invite))

    def test_is_a_sign_of_life(self, clean_db: Database) -> None:
        """A site that repeats its join after a day is there, so that a round may begin with it."""
        desk = Desk(clean_db, fedavg_plan(min_clients=2), polling=False)
        invite = enrolment.invite(desk.ctx, OPERATOR, desk.name, 3600).token
        join(desk, invite)
        desk.wait(86400)
        join(desk, invite)
        desk.join("south")
        assert desk.round.participants == 2

    def test_waits_for_the_federation_before_its_client(self, desk: Desk, invite: str) -> None:
        """In the order of a revocation, or the two would lock each other out."""
        client_id = join(desk, invite).client_id

        def lock(session: Session) -> None:
            federations.load(session, desk.name, lock=True)

        with (
            pytest.raises(NotAllowed, match="used already"),
            waiting_for(desk.db, lock, lambda: join(desk, invite)) as session,
        ):
            session.get_one(Client, client_id, with_for_update=LOCK).state = "revoked"

    def test_of_a_federation_that_is_being_deleted_is_refused(self, desk: Desk, invite: str) -> None:
        def delete(session: Session) -> None:
            federations.load(session, desk.name, lock=True).deleted_at = desk.clock()

        with (
            pytest.raises(NotAuthenticated, match="invite is not valid"),
            waiting_for(desk.db, delete, lambda: join(desk, invite)),
        ):
            pass
        assert deletion.finish(desk.ctx) == 1

    def test_costs_the_requests_that_follow_no_write(self, desk: Desk, invite: str) -> None:
        token = join(desk, invite).token
        enrolment.authenticate(desk.ctx, token)
        with statements(desk.db) as seen:
            enrolment.authenticate(desk.ctx, token)
        assert [statement.split()[0] for statement in seen] == ["SELECT"]


class TestRenewedToken:
    @pytest.fixture
    def old(self, desk: Desk, invite: str) -> str:
        return join(desk, invite).token

    def test_ends_the_old_one_when_it_is_first_used(self, desk: Desk, old: str) -> None:
        who = enrolment.authenticate(desk.ctx, old)
        new = enrolment.renew(desk.ctx, who, SITE).token
        assert enrolment.authenticate(desk.ctx, old) == who, "the answer may have been lost"
        assert enrolment.authenticate(desk.ctx, new) == who
        refused(NotAuthenticated, "invalid-token", lambda: enrolment.authenticate(desk.ctx, old))
        assert enrolment.authenticate(desk.ctx, new) == who
        assert actions(desk)[-2:] == ["client.renew", "client.renewed"]

    def test_is_replaced_by_the_next_one(self, desk: Desk, old: str) -> None:
        who = enrolment.authenticate(desk.ctx, old)
        lost = enrolment.renew(desk.ctx, who, SITE).token
        new = enrolment.renew(desk.ctx, who, SITE).token
        refused(NotAuthenticated, "invalid-token", lambda: enrolment.authenticate(desk.ctx, lost))
        assert enrolment.authenticate(desk.ctx, new) == who

    def test_interrupts_no_request_under_way(self, desk: Desk, old: str) -> None:
        """An upload that began with the old token is still the same client's."""
        who = enrolment.authenticate(desk.ctx, old)
        enrolment.authenticate(desk.ctx, enrolment.renew(desk.ctx, who, SITE).token)
        assert tasks.task(desk.ctx, who).action == "train"
        desk.upload(who, 1)

    def test_is_worthless_after_a_rotation(self, desk: Desk, old: str) -> None:
        who = enrolment.authenticate(desk.ctx, old)
        pending = enrolment.renew(desk.ctx, who, SITE).token
        enrolment.rotate(desk.ctx, OPERATOR, desk.name, "north")
        for token in (old, pending):
            refused(NotAuthenticated, "invalid-token", lambda tried=token: enrolment.authenticate(desk.ctx, tried))
        refused(NotAuthenticated, "invalid-token", lambda: enrolment.renew(desk.ctx, who, SITE))

    def test_is_refused_while_the_operator_rotates_the_old_one(self, desk: Desk, old: str) -> None:
        """Else whoever has stolen the old one could keep access."""
        who = enrolment.authenticate(desk.ctx, old)

        def rotate(session: Session) -> None:
            session.get_one(Client, who.client_id, with_for_update=LOCK).token_generation += 1

        with (
            pytest.raises(NotAuthenticated),
            waiting_for(desk.db, rotate, lambda: enrolment.renew(desk.ctx, who, SITE)),
        ):
            pass

    def test_is_not_used_up_by_somebody_without_the_certificate(self, desk: Desk, old: str) -> None:
        who = enrolment.authenticate(desk.ctx, old, certificate="ab" * 32)
        new = enrolment.renew(desk.ctx, who, SITE).token
        refused(NotAllowed, "wrong-certificate", lambda: enrolment.authenticate(desk.ctx, new, "cd" * 32))
        refused(NotAllowed, "wrong-certificate", lambda: enrolment.authenticate(desk.ctx, new))
        assert enrolment.authenticate(desk.ctx, old, "ab" * 32) == who

    def test_is_not_given_without_bound(self, desk: Desk, old: str) -> None:
        who = enrolment.authenticate(desk.ctx, old)
        for _ in range(enrolment.CHANGES_PER_HOUR):
            enrolment.renew(desk.ctx, who, SITE)
        refused(TooMany, "too-many-changes", lambda: enrolment.renew(desk.ctx, who, SITE))


class TestInvites:
    def test_are_listed_with_what_became_of_them(self, desk: Desk) -> None:
        used, gone, expired, still_open = (
            enrolment.invite(desk.ctx, OPERATOR, desk.name, hours * 3600, note)
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
        made = enrolment.invite(desk.ctx, OPERATOR, desk.name, 3600)
        for _ in range(2):
            invites.revoke(desk.ctx, OPERATOR, desk.name, made.id)
        for step in (lambda: enrolment.preview(desk.ctx, made.token), lambda: join(desk, made.token)):
            refused(NotAllowed, "invite-revoked", step)
        assert actions(desk).count("invite.revoke") == 1

    def test_that_were_used_cannot_be_revoked(self, desk: Desk, invite: str) -> None:
        join(desk, invite)
        (view,) = invites.invites_of(desk.ctx, desk.name)
        error = refused(Conflict, "invite-used", lambda: invites.revoke(desk.ctx, OPERATOR, desk.name, view.id))
        assert error.next_step == "To end that client's access: distrans-server client revoke pets north"

    def test_of_another_federation_are_not_found(self, desk: Desk) -> None:
        federations.create(desk.ctx, OPERATOR, fedavg_plan("birds"))
        made = enrolment.invite(desk.ctx, OPERATOR, "birds", 3600)
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
        assert (again.status_code, again.json()["code"]) == (403, "invite-used")
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
