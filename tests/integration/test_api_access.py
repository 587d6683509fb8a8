"""Who may call what: every route, called by every kind of caller."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Mount
from support.api import SCRAPE_TOKEN, Api, open_api, problem_of
from support.api_calls import create_invite
from support.coordinator import ADMIN_TOKEN
from support.databases import KINDS, new_database
from support.plans import small_plan, update_body

from server.dashboard.routes import router as pages
from server.http.rate_limits import FailureThrottle
from server.service import invites
from server.service.context import Actor, Context
from server.store.database import Database
from shared.tensors.wire import digest, digest_header

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

# In an order in which all of them succeed.
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

# The error code for each kind of caller; in KNOWN, by kind of route.
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
    """Return the code this caller must get, or None if the call is allowed."""
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
    """A federation with an open round and clients in every state, and a second federation."""

    api: Api
    round_id: int
    spare_invite: str  # its id
    headers: dict[str, str | None]  # Authorization, by caller

    def send(self, route: Route, caller: str) -> httpx.Response:
        """Send the route's request with this caller's credentials."""
        path = route.path.format(
            name="pets", round_id=self.round_id, client="south", number=0, invite=self.spare_invite
        )
        options = dict(route.options)
        authorization = self.headers[caller]
        headers = dict(options.pop("headers", {}))
        if authorization is not None:
            headers["Authorization"] = authorization.encode("latin-1")
        return self.api.http.request(route.method, path + route.query, headers=headers, **options)


def old_invite(db_url: str, name: str) -> str:
    """Return an expired invite."""
    db = Database(db_url)
    ctx = Context(db, clock=lambda: time.time() - 1000)
    token = invites.create(ctx, Actor("operator"), name, 1).token
    db.close()
    return token


def spoiled(token: str) -> str:
    """Return the token with another secret."""
    return token[:-1] + ("a" if token[-1] != "a" else "b")


def build_world(api: Api) -> World:
    other = small_plan("birds", rounds={"deadline_s": 3600})
    api.create(PETS, start=False)
    api.create(other)
    api.app.state.throttle = FailureThrottle(free_failures=1_000_000)
    used = create_invite(api, "pets")
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
        "an unused invite": create_invite(api, "pets"),
        "a wrong admin token": spoiled(ADMIN_TOKEN),
        "the scraper": SCRAPE_TOKEN,
        "the admin": ADMIN_TOKEN,
        "a participant": north,
        "a client that was not chosen": late,
        "another federation's client": foreign,
        "an invite's wrong secret": spoiled(create_invite(api, "pets")),
        "a used invite": used,
        "an old invite": old_invite(api.db_url, "pets"),
    }
    headers: dict[str, str | None] = {caller: f"Bearer {token}" for caller, token in tokens.items()}
    headers |= {"nobody": None, "another scheme": f"Basic {north}", "letters that are not ASCII": "Bearer dtc_é_ü"}
    return World(api, under_way.id, api.admin("POST", "/v1/federations/pets/invites")["id"], headers)


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Set the scene once, for calls that change nothing."""
    with open_api(new_database(request.param, request, tmp_path_factory.mktemp("access"))) as api:
        yield build_world(api)


def all_routes(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield method and path of every route, including nested routers, which newer releases of FastAPI keep."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from all_routes(included.routes)
        elif not isinstance(route, Mount):  # the files of /docs
            yield from ((method, route.path) for method in route.methods)


def test_every_route_is_in_the_table(world: World) -> None:
    """Add a new route to ROUTES, or to OPEN if everybody may call it. Pages have test_dashboard_access.py."""
    listed = [(route.method, route.path) for route in ROUTES]
    assert len(listed) == len(set(listed))
    assert set(all_routes(world.api.app.routes)) - set(all_routes(pages.routes)) == set(listed) | OPEN


def documented(app: FastAPI, route: Route) -> set[str]:
    """Return the statuses in the OpenAPI document."""
    return set(app.openapi()["paths"][route.path][route.method.lower()]["responses"])


@pytest.mark.parametrize("caller", [*UNKNOWN, *KNOWN, *INVITES])
def test_callers_without_access_get_the_documented_error_and_change_nothing(world: World, caller: str) -> None:
    """Each response has the right status and code and is documented; after all of them, nothing has changed."""
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


def test_every_route_serves_the_callers_it_is_for(db_url: str) -> None:
    with open_api(db_url) as api:
        world = build_world(api)
        answers = {
            (route.method, route.path, caller): world.send(route, caller).status_code
            for route in ROUTES
            for caller in RIGHTFUL[route.access]
        }
    no_older_model = {("POST", "/v1/federations/{name}/rollback", "the admin"): 409}
    assert {key: status for key, status in answers.items() if not 200 <= status < 300} == no_older_model


def test_open_routes_need_no_token(world: World) -> None:
    for method, path in OPEN:
        assert world.api.call(method, path, token=None).status_code == 200


class TestInvites:
    def test_an_invite_is_valid_for_its_own_federation_only(self, world: World) -> None:
        token = create_invite(world.api, "birds")
        assert world.api.call("GET", "/v1/join", token).json()["federation"] == "birds"
        body = {"name": "newcomer", "class_counts": {"dog": 1}}
        joined = world.api.call("POST", "/v1/join", token, json=body)
        assert (joined.status_code, joined.json()["federation"]) == (201, "birds")
        answer = world.api.call("GET", "/v1/federations/pets", joined.json()["token"])
        assert problem_of(answer) == (404, "no-such-federation")

    def test_neither_a_preview_nor_a_refused_join_uses_up_an_invite(self, world: World) -> None:
        token = create_invite(world.api, "pets")
        for _ in range(2):
            assert world.api.call("GET", "/v1/join", token).status_code == 200
        refused = world.api.call("POST", "/v1/join", token, json={"name": "x", "class_counts": {"cow": 1}})
        assert problem_of(refused) == (422, "unknown-class")
        taken = world.api.call("POST", "/v1/join", token, json={"name": "north", "class_counts": {"cat": 1}})
        assert problem_of(taken) == (409, "client-name-taken")
        empty = world.api.call("POST", "/v1/join", token, json={"name": "x", "class_counts": {"cat": 0}})
        assert problem_of(empty) == (422, "no-data")
        body = {"name": "patient", "class_counts": {"cat": 1}}
        assert world.api.call("POST", "/v1/join", token, json=body).status_code == 201
        again = world.api.call("POST", "/v1/join", token, json=body)
        assert problem_of(again) == (403, "invite-used")

    def test_only_holders_of_an_invite_learn_what_is_wrong_with_their_request(self, world: World) -> None:
        for body in ({}, {"name": "a b"}, {"name": "north", "class_counts": {}, "speed": 1}):
            for caller, code in INVITES.items():
                answer = world.send(Route("POST", "/v1/join", INVITE, options={"json": body}), caller)
                assert problem_of(answer) == (STATUSES[code], code)
            assert world.api.call("POST", "/v1/join", None, json=body).json()["code"] == "no-token"
        refused = world.api.call("POST", "/v1/join", create_invite(world.api, "pets"), json={})
        assert refused.json()["code"] == "invalid-request"
