"""Who may call what: every route with every kind of caller."""

import csv
import io
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy.engine import make_url
from starlette.routing import Mount
from support.api import SCRAPE_TOKEN, Api, new_database, open_api
from support.coordinator import ADMIN_TOKEN, Site
from support.databases import KINDS
from support.plans import small_plan, update_body

from server.api.request_limits import FailureThrottle
from server.service import enrolment
from server.service.context import Actor, Context
from server.settings import Settings
from server.store.session import Database
from shared.http.request_id import RequestIdFilter
from shared.plan import FederationPlan
from shared.wire import digest, digest_header

ADMIN, MEMBER, ANY, CLIENT, OWN, ROUND, INVITE, SCRAPE = (
    "the admin",
    "the admin and the federation's clients",
    "the admin and every client",
    "clients, about themselves",
    "the federation's clients, about themselves",
    "the round's participants",
    "holders of an invite",
    "the admin and the scraper",
)
OPEN = {
    ("GET", "/"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/docs"),
    *((method, "/openapi.json") for method in ("GET", "HEAD")),
}


@dataclass(frozen=True)
class Route:
    """A call, who may make it, and a request that would succeed."""

    method: str
    path: str
    access: str
    query: str = ""
    options: dict[str, Any] = field(default_factory=dict)


PETS = small_plan(
    "pets",
    method={"name": "distrans", "offset_aggregation": "none"},
    rounds={"min_clients": 3, "deadline_s": 3600},
)
UPDATE = update_body(PETS, {"offset_aggregation": "none"})
PART = {"Upload-Offset": "0", "Upload-Length": "100", "Repr-Digest": digest_header(digest(b""))}
MEASURED = {"samples": 10, "correct": 7, "loss_sum": 3.0}

# In this order each of them can be carried out, one after the other.
ROUTES = [
    Route("GET", "/metrics", SCRAPE),
    Route("POST", "/v1/federations", ADMIN, options={"json": small_plan("fish").model_dump(mode="json")}),
    Route("GET", "/v1/federations", ANY),
    Route("GET", "/v1/federations/{name}", MEMBER),
    Route("POST", "/v1/federations/{name}/start", ADMIN),
    Route("POST", "/v1/federations/{name}/pause", ADMIN),
    Route("POST", "/v1/federations/{name}/resume", ADMIN),
    Route("POST", "/v1/federations/{name}/invites", ADMIN),
    Route("GET", "/v1/federations/{name}/invites", ADMIN),
    Route("DELETE", "/v1/federations/{name}/invites/{invite}", ADMIN),
    Route("GET", "/v1/join", INVITE),
    Route("POST", "/v1/join", INVITE, options={"json": {"name": "newcomer", "class_counts": {"cat": 1}}}),
    Route("GET", "/v1/federations/{name}/clients", MEMBER),
    Route("GET", "/v1/federations/{name}/rounds", MEMBER),
    Route("GET", "/v1/federations/{name}/metrics.csv", MEMBER),
    Route("GET", "/v1/federations/{name}/heterogeneity", MEMBER),
    Route("GET", "/v1/federations/{name}/model", MEMBER),
    Route("HEAD", "/v1/federations/{name}/model", MEMBER),
    Route("GET", "/v1/federations/{name}/personal", OWN, "?model=0"),
    Route("HEAD", "/v1/federations/{name}/personal", OWN, "?model=0"),
    Route("GET", "/v1/audit", ADMIN),
    Route("GET", "/v1/me", CLIENT),
    Route("PATCH", "/v1/me", CLIENT, options={"json": {"class_counts": {"cat": 3}, "held_out_images": 10}}),
    Route("POST", "/v1/me/token", CLIENT),
    Route("PUT", "/v1/me/status", CLIENT, options={"json": {"activity": "waiting"}}),
    Route("GET", "/v1/task", CLIENT, "?wait=0"),
    Route("PUT", "/v1/models/{number}/evaluation", CLIENT, options={"json": MEASURED}),
    Route("GET", "/v1/rounds/{round_id}/model", ROUND),
    Route("HEAD", "/v1/rounds/{round_id}/model", ROUND),
    Route("GET", "/v1/rounds/{round_id}/personal", ROUND),
    Route("HEAD", "/v1/rounds/{round_id}/personal", ROUND),
    Route("POST", "/v1/rounds/{round_id}/update", ROUND, options={"headers": {"Upload-Complete": "?0"}}),
    Route("HEAD", "/v1/rounds/{round_id}/update", ROUND),
    Route("PATCH", "/v1/rounds/{round_id}/update", ROUND, options={"headers": PART, "content": b"x"}),
    Route("DELETE", "/v1/rounds/{round_id}/update", ROUND),
    Route("PUT", "/v1/rounds/{round_id}/update", ROUND, options={"content": UPDATE}),
    Route("POST", "/v1/federations/{name}/clients/{client}/rotate", ADMIN),
    Route("POST", "/v1/federations/{name}/clients/{client}/revoke", ADMIN),
    Route("DELETE", "/v1/me", CLIENT),
    Route("POST", "/v1/federations/{name}/rollback", ADMIN, options={"json": {"to": 0}}),
    Route("POST", "/v1/federations/{name}/cancel", ADMIN),
    Route("DELETE", "/v1/federations/{name}", ADMIN, "?confirm=pets"),
]  # fmt: skip

# What callers without a right token are told; `None` in the second table: they may.
UNKNOWN = {
    "nobody": "no-token",
    "another scheme": "no-token",
    "an empty token": "no-token",
    "nonsense": "invalid-token",
    "half a token": "invalid-token",
    "letters that are not ASCII": "invalid-token",
    "a wrong secret": "invalid-token",
    "a client that never was": "invalid-token",
    "a rotated client's old token": "invalid-token",
    "a revoked client": "client-revoked",
    "a client that has left": "client-left",
    "an unused invite": "invalid-token",
    "a wrong admin token": "invalid-token",
    "the scraper": "invalid-token",
}
KNOWN = {
    "the admin": {CLIENT: "client-only", OWN: "client-only", ROUND: "client-only"},
    "a participant": {ADMIN: "admin-only"},
    "a client that was not chosen": {ADMIN: "admin-only", ROUND: "not-a-participant"},
    "another federation's client": {
        ADMIN: "admin-only",
        MEMBER: "no-such-federation",
        OWN: "no-such-federation",
        ROUND: "no-such-round",
    },
}
INVITES = {
    "an invite's wrong secret": "invalid-invite",
    "a used invite": "invite-used",
    "an old invite": "invite-expired",
}
STATUSES = {
    "no-token": 401,
    "invalid-token": 401,
    "invalid-invite": 401,
    "invite-used": 403,
    "invite-expired": 403,
    "client-revoked": 403,
    "client-left": 403,
    "admin-only": 403,
    "client-only": 403,
    "not-a-participant": 403,
    "no-such-federation": 404,
    "no-such-round": 404,
}


def refusal(route: Route, caller: str) -> str | None:
    """The code that this caller must get, or None where the call is allowed."""
    if caller in INVITES:
        return INVITES[caller] if route.access == INVITE else "invalid-token"
    if route.access == INVITE:
        allowed = caller == "an unused invite"
        return None if allowed else "no-token" if UNKNOWN.get(caller) == "no-token" else "invalid-invite"
    if route.access == SCRAPE:
        allowed = caller in ("the admin", "the scraper")
        return None if allowed else "no-token" if UNKNOWN.get(caller) == "no-token" else "invalid-token"
    return UNKNOWN[caller] if caller in UNKNOWN else KNOWN[caller].get(route.access)


@dataclass
class World:
    """A federation with an open round, clients in every state, and another federation beside it."""

    api: Api
    round_id: int
    spare_invite: str  # its id
    headers: dict[str, str | None]  # Authorization, by caller

    def send(self, route: Route, caller: str) -> httpx.Response:
        """The route's request with this caller's credentials."""
        path = route.path.format(
            name="pets", round_id=self.round_id, client="south", number=0, invite=self.spare_invite
        )
        options = dict(route.options)
        authorization = self.headers[caller]
        headers = dict(options.pop("headers", {}))
        if authorization is not None:
            headers["Authorization"] = authorization.encode("latin-1")
        return self.api.http.request(route.method, path + route.query, headers=headers, **options)


def invite(api: Api, name: str) -> str:
    return str(api.admin("POST", f"/v1/federations/{name}/invites")["token"])


def old_invite(db_url: str, name: str) -> str:
    """An invite of long ago."""
    db = Database(db_url)
    ctx = Context(db, clock=lambda: time.time() - 1000)
    token = enrolment.invite(ctx, Actor("operator"), name, 1).token
    db.close()
    return token


def spoiled(token: str) -> str:
    """The same owner, another secret."""
    return token[:-1] + ("a" if token[-1] != "a" else "b")


def build_world(api: Api) -> World:
    other = small_plan("birds", rounds={"deadline_s": 3600})
    api.create(PETS, start=False)
    api.create(other)
    api.app.state.throttle = FailureThrottle(free_failures=1_000_000)
    used = invite(api, "pets")
    body = {"name": "north", "class_counts": {"cat": 2}}
    north = api.call("POST", "/v1/join", used, json=body).json()["token"]
    gone, banned, turned, _south = (
        api.join(PETS, name, {"cat": 1, "dog": 1}).token for name in ("gone", "banned", "turned", "south")
    )
    assert api.call("DELETE", "/v1/me", gone).status_code == 204
    api.admin("POST", "/v1/federations/pets/clients/banned/revoke")
    assert api.admin("POST", "/v1/federations/pets/clients/turned/rotate")["token"] != turned
    api.admin("POST", "/v1/federations/pets/start")
    late = api.join(PETS, "late", {"dog": 1}).token
    foreign = api.join(other, "heron", {"cat": 1}).token
    under_way = api.show("pets").round
    assert under_way is not None
    tokens = {
        "an empty token": "",
        "nonsense": "nonsense",
        "half a token": north.rpartition("_")[0],
        "a wrong secret": spoiled(north),
        "a client that never was": "dtc_" + 32 * "0" + "_" + "secret",
        "a rotated client's old token": turned,
        "a revoked client": banned,
        "a client that has left": gone,
        "an unused invite": invite(api, "pets"),
        "a wrong admin token": spoiled(ADMIN_TOKEN),
        "the scraper": SCRAPE_TOKEN,
        "the admin": ADMIN_TOKEN,
        "a participant": north,
        "a client that was not chosen": late,
        "another federation's client": foreign,
        "an invite's wrong secret": spoiled(invite(api, "pets")),
        "a used invite": used,
        "an old invite": old_invite(api.db_url, "pets"),
    }
    headers: dict[str, str | None] = {caller: f"Bearer {token}" for caller, token in tokens.items()}
    headers |= {"nobody": None, "another scheme": f"Basic {north}", "letters that are not ASCII": "Bearer dtc_é_ü"}
    return World(api, under_way.id, api.admin("POST", "/v1/federations/pets/invites")["id"], headers)


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For calls that change nothing."""
    with open_api(new_database(request.param, request, tmp_path_factory.mktemp("access"))) as api:
        yield build_world(api)


def all_routes(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Method and path of every route, also of included routers, which newer releases of FastAPI keep as they are."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from all_routes(included.routes)
        elif not isinstance(route, Mount):  # files of the page for people
            yield from ((method, route.path) for method in route.methods)


def test_every_route_is_in_the_table(world: World) -> None:
    """Add a new route to ROUTES, or to OPEN if everybody may call it."""
    listed = [(route.method, route.path) for route in ROUTES]
    assert len(listed) == len(set(listed))
    assert set(all_routes(world.api.app.routes)) == set(listed) | OPEN


def documented(app: FastAPI, route: Route) -> set[str]:
    """The statuses that the OpenAPI page promises."""
    return set(app.openapi()["paths"][route.path][route.method.lower()]["responses"])


@pytest.mark.parametrize("caller", [*UNKNOWN, *KNOWN, *INVITES])
def test_who_is_refused_and_how(world: World, caller: str) -> None:
    """Each answer has the right status and code, is documented, and nothing has changed after all of them."""
    before = world.api.admin("GET", "/v1/audit?limit=1000")
    wanted, found = {}, {}
    for route in ROUTES:
        code = refusal(route, caller)
        if code is None:
            continue
        key = f"{route.method} {route.path}"
        answer = world.send(route, caller)
        wanted[key] = (STATUSES[code], None if route.method == "HEAD" else code)
        found[key] = (answer.status_code, None if route.method == "HEAD" else answer.json().get("code"))
        assert answer.headers.get("WWW-Authenticate") == ("Bearer" if answer.status_code == 401 else None)
        assert str(answer.status_code) in documented(world.api.app, route), key
        if route.method != "HEAD":
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json()["request_id"] == answer.headers["X-Request-ID"]
    assert found == wanted
    assert world.api.admin("GET", "/v1/audit?limit=1000") == before


RIGHTFUL = {
    ADMIN: ["the admin"],
    MEMBER: ["the admin", "a participant", "a client that was not chosen"],
    ANY: ["the admin", "a participant", "another federation's client"],
    CLIENT: ["a participant"],
    OWN: ["a participant", "a client that was not chosen"],
    ROUND: ["a participant"],
    INVITE: ["an unused invite"],
    SCRAPE: ["the scraper", "the admin"],
}


def test_who_may(db_url: str) -> None:
    """Every route can be used by those it is for."""
    with open_api(db_url) as api:
        world = build_world(api)
        answers = {
            (route.method, route.path, caller): world.send(route, caller).status_code
            for route in ROUTES
            for caller in RIGHTFUL[route.access]
        }
    nothing_to_go_back_to = {("POST", "/v1/federations/{name}/rollback", "the admin"): 409}
    assert {key: status for key, status in answers.items() if not 200 <= status < 300} == nothing_to_go_back_to


def test_open_routes_need_no_token(world: World) -> None:
    for method, path in OPEN:
        assert world.api.call(method, path, token=None).status_code == 200


class TestInvites:
    def test_an_invite_leads_to_its_own_federation_alone(self, world: World) -> None:
        token = invite(world.api, "birds")
        assert world.api.call("GET", "/v1/join", token).json()["federation"] == "birds"
        body = {"name": "newcomer", "class_counts": {"dog": 1}}
        joined = world.api.call("POST", "/v1/join", token, json=body)
        assert (joined.status_code, joined.json()["federation"]) == (201, "birds")
        answer = world.api.call("GET", "/v1/federations/pets", joined.json()["token"])
        assert (answer.status_code, answer.json()["code"]) == (404, "no-such-federation")

    def test_looking_does_not_use_it_up_and_a_refused_join_does_not_either(self, world: World) -> None:
        token = invite(world.api, "pets")
        for _ in range(2):
            assert world.api.call("GET", "/v1/join", token).status_code == 200
        refused = world.api.call("POST", "/v1/join", token, json={"name": "x", "class_counts": {"cow": 1}})
        assert (refused.status_code, refused.json()["code"]) == (422, "unknown-class")
        taken = world.api.call("POST", "/v1/join", token, json={"name": "north", "class_counts": {"cat": 1}})
        assert (taken.status_code, taken.json()["code"]) == (409, "client-name-taken")
        empty = world.api.call("POST", "/v1/join", token, json={"name": "x", "class_counts": {"cat": 0}})
        assert (empty.status_code, empty.json()["code"]) == (422, "no-data")
        body = {"name": "patient", "class_counts": {"cat": 1}}
        assert world.api.call("POST", "/v1/join", token, json=body).status_code == 201
        again = world.api.call("POST", "/v1/join", token, json=body)
        assert (again.status_code, again.json()["code"]) == (403, "invite-used")

    def test_faults_of_a_body_are_shown_to_holders_of_an_invite_alone(self, world: World) -> None:
        for body in ({}, {"name": "a b"}, {"name": "north", "class_counts": {}, "speed": 1}):
            for caller, code in INVITES.items():
                answer = world.send(Route("POST", "/v1/join", INVITE, options={"json": body}), caller)
                assert (answer.status_code, answer.json()["code"]) == (STATUSES[code], code)
            assert world.api.call("POST", "/v1/join", None, json=body).json()["code"] == "no-token"
        refused = world.api.call("POST", "/v1/join", invite(world.api, "pets"), json={})
        assert refused.json()["code"] == "invalid-request"


def follow(site: Site, model: int) -> None:
    """Wait until the coordinator has published this model."""
    task = site.task(wait_s=0)
    while task.model is None or task.model.number < model:
        task = site.task(after=task.ticket)


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, Site, Site]]:
    """A federation whose two clients have trained, uploaded and measured one round, and are in the second."""
    plan: FederationPlan = small_plan("pets", rounds={"min_clients": 2, "count": 3})
    with open_api(new_database(request.param, request, tmp_path_factory.mktemp("trained"))) as api:
        api.create(plan)
        api.create(small_plan("birds"))
        north, south = (api.join(plan, name, counts) for name, counts in (("north", {"cat": 3}), ("south", {"dog": 5})))
        for seed, site in enumerate((north, south)):
            task = site.task()
            assert task.round is not None
            assert site.put(task.round.id, update_body(plan, task.facts, seed, samples=7 + seed)).status_code == 200
        for site in (north, south):
            follow(site, 1)
            assert api.call("PUT", "/v1/models/1/evaluation", site.token, json=MEASURED).status_code == 204
        yield api, north, south


class TestAClientSeesItsOwnRows:
    def test_federations(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        assert [view["name"] for view in api.call("GET", "/v1/federations", north.token).json()] == ["pets"]
        assert [view["name"] for view in api.admin("GET", "/v1/federations")] == ["birds", "pets"]

    def test_clients(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        (own,) = api.call("GET", "/v1/federations/pets/clients", north.token).json()
        assert own == api.call("GET", "/v1/me", north.token).json()
        assert (own["name"], own["class_counts"]) == ("north", {"cat": 3, "dog": 0})
        assert [view["name"] for view in api.admin("GET", "/v1/federations/pets/clients")] == ["north", "south"]

    def test_rounds(self, trained: tuple[Api, Site, Site]) -> None:
        api, _, south = trained
        first, second = api.call("GET", "/v1/federations/pets/rounds", south.token).json()
        assert [upload["client"] for upload in first["uploads"]] == ["south"]
        assert list(first["client_evaluations"]) == ["south"]
        assert first["evaluation"] is None  # of two clients, the pooled figure would give the other's away
        assert (first["participants"], first["updates"], second["uploads"]) == (2, 2, [])
        for_the_admin = api.admin("GET", "/v1/federations/pets/rounds")[0]
        assert [upload["client"] for upload in for_the_admin["uploads"]] == ["north", "south"]
        assert for_the_admin["evaluation"]["samples"] == 20

    def test_metrics(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        answer = api.call("GET", "/v1/federations/pets/metrics.csv", north.token)
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert [(row["round"], row["client"], row["samples"]) for row in rows] == [("1", "north", "7")]

    def test_heterogeneity(self, trained: tuple[Api, Site, Site]) -> None:
        api, north, _ = trained
        view = api.call("GET", "/v1/federations/pets/heterogeneity", north.token).json()
        assert (view["clients"], view["embeddings"]) == ({"north": [3, 0]}, {"north": [1.0, 0.0]})
        assert api.admin("GET", "/v1/federations/pets/heterogeneity")["clients"] == {"north": [3, 0], "south": [0, 5]}

    def test_personal_tensors(self, trained: tuple[Api, Site, Site]) -> None:
        """The same address, two callers, two offsets; nothing in the request can name another client."""
        _, north, south = trained
        task = north.task()
        assert task.personal_url is not None
        own = [site.http.get(task.personal_url, headers=site.headers) for site in (north, south)]
        assert own[0].content != own[1].content
        ids = [site.http.get("/v1/me", headers=site.headers).json()["id"] for site in (north, south)]
        for name in ("client", "client_id", "id", "name"):
            asked = north.http.get(task.personal_url, params={name: ids[1]}, headers=north.headers)
            assert asked.status_code == 422
        tagged = north.http.get(task.personal_url, headers=north.headers | {"If-None-Match": own[1].headers["ETag"]})
        assert tagged.status_code == 200  # the other's tag is not confirmed

    def test_uploads(self, trained: tuple[Api, Site, Site]) -> None:
        """HEAD tells the caller's own progress."""
        _, north, south = trained
        task = south.task()
        assert task.round is not None
        whole = update_body(south.plan, task.facts, 9)
        assert south.patch(task.round.id, whole[:100], 0, whole).status_code == 204
        url = f"/v1/rounds/{task.round.id}/update"
        assert north.http.head(url, headers=north.headers).headers["Upload-Offset"] == "0"
        assert south.http.head(url, headers=south.headers).headers["Upload-Offset"] == "100"


class TestThrottle:
    def test_repeated_failures_are_slowed_down_and_right_tokens_pass(self, db_url: str) -> None:
        plan = small_plan()
        with open_api(db_url) as api:
            api.create(plan)
            site = api.join(plan, "north", {"cat": 1})
            calls = [
                ("GET", "/v1/me"),
                ("POST", "/v1/federations/pets/start"),
                ("GET", "/v1/join"),
                ("GET", "/metrics"),
            ]
            for attempt in range(10):
                assert api.call(*calls[attempt % 4], "wrong").status_code == 401
            waits = []
            for method, path in calls:
                answer = api.call(method, path, "wrong")
                assert (answer.status_code, answer.json()["code"]) == (429, "too-many-failures")
                waits.append(int(answer.headers["Retry-After"]))
            assert min(waits) >= 1
            assert api.call("GET", "/v1/me", site.token).status_code == 200
            assert api.call("GET", "/v1/federations").status_code == 200
            assert api.call("GET", "/v1/join", invite(api, "pets")).status_code == 200
            elsewhere = TestClient(api.app, client=("192.0.2.7", 4711))
            assert elsewhere.get("/v1/me", headers={"Authorization": "Bearer wrong"}).status_code == 401


class TestTokensStaySecret:
    def test_they_are_not_logged_nor_stored(self, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
        """Not even at the level of debugging, where SQL and its parameters are logged."""
        caplog.set_level(logging.DEBUG)
        caplog.set_level(logging.INFO, logger="sqlalchemy.engine")
        caplog.handler.addFilter(RequestIdFilter())
        plan = small_plan()
        with open_api(db_url) as api:
            api.create(plan)
            token = invite(api, "pets")
            joined = api.call("POST", "/v1/join", token, json={"name": "north", "class_counts": {"cat": 1}}).json()
            rotated = api.admin("POST", "/v1/federations/pets/clients/north/rotate")["token"]
            assert api.call("GET", "/v1/me", rotated).status_code == 200
            assert api.call("GET", "/v1/me", joined["token"]).status_code == 401
            assert api.call("GET", "/v1/me", "a-wrong-token-of-somebody").status_code == 401
            assert api.call("GET", "/metrics", SCRAPE_TOKEN).status_code == 200
            audit = api.call("GET", "/v1/audit").text
        secrets = [text.split("_", 2)[2] for text in (token, joined["token"], rotated)]
        secrets += [ADMIN_TOKEN, SCRAPE_TOKEN, "a-wrong-token-of-somebody"]
        logged = "\n".join(str(record.__dict__) + record.getMessage() for record in caplog.records)
        assert "POST /v1/join" in logged
        assert "INSERT INTO clients" in logged
        stored = b""
        if db_url.startswith("sqlite"):
            file = Path(str(make_url(db_url).database))
            stored = b"".join(path.read_bytes() for path in file.parent.glob(file.name + "*"))
        for secret in secrets:
            assert secret not in logged
            assert secret not in audit
            assert secret.encode() not in stored

    def test_settings_do_not_show_them(self) -> None:
        settings = Settings("sqlite:///x.db", ADMIN_TOKEN, SCRAPE_TOKEN)
        assert ADMIN_TOKEN not in f"{settings!r} {settings}"
        assert SCRAPE_TOKEN not in f"{settings!r} {settings}"
