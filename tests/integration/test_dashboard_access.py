"""Who may open the dashboard's pages and act on them: sessions, viewers, and other sites' forms."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.api import Api, open_api
from support.coordinator import ADMIN_TOKEN
from support.databases import KINDS, new_database
from support.plans import small_plan
from support.signed_in import OWN, VIEWER_TOKEN, Person, hidden

from server.dashboard.routes import router
from server.http.app import create_app
from server.service.settings import Settings
from shared.http.sessions import LIFETIME_S

COOKIE = "distrans"
PUBLIC = {("GET", "/sign-in"), ("POST", "/sign-in")}


@pytest.fixture(scope="module", params=KINDS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    url = new_database(request.param, request, tmp_path_factory.mktemp("dashboard"))
    with open_api(url, viewer_token=VIEWER_TOKEN, requests_per_s=0) as running:
        running.create(small_plan())
        running.join(small_plan(), "north", {"cat": 3})
        yield running


def routes(found: Any = router) -> Iterator[tuple[str, str]]:
    for route in found.routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from routes(included)
        else:
            yield from ((method, route.path) for method in sorted(route.methods))


ROUTES = sorted(set(routes()) - PUBLIC)


def filled(path: str) -> str:
    return path.format(name="pets", target="north")


def state(api: Api) -> Any:
    return api.admin("GET", "/v1/federations/pets")["state"], len(api.admin("GET", "/v1/audit?limit=1000"))


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nobody_sees_or_does_anything_without_signing_in(api: Api, method: str, path: str) -> None:
    before = state(api)
    answer = Person(api, None).http.request(method, filled(path), headers=OWN)
    assert answer.status_code == 303
    assert answer.headers["Location"].startswith("/sign-in")
    assert state(api) == before


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p in ROUTES if m == "POST" and p != "/sign-out"])
def test_viewers_and_other_sites_cannot_act(api: Api, method: str, path: str) -> None:
    viewer, admin = Person(api, VIEWER_TOKEN), Person(api)
    token = hidden(admin.get("/new"), "csrf")
    before = state(api)
    refused = {
        "a viewer": viewer.http.request(method, filled(path), data={"csrf": token}, headers=OWN),
        "a form of another site": admin.http.request(
            method, filled(path), data={"csrf": token}, headers={"Sec-Fetch-Site": "cross-site"}
        ),
        "another origin": admin.http.request(
            method, filled(path), data={"csrf": token}, headers={"Origin": "https://evil.example"}
        ),
        "no origin": admin.http.request(method, filled(path), data={"csrf": token}),
        "no token": admin.http.request(method, filled(path), headers=OWN, data={"x": "y"}),
        "another session's token": Person(api).http.request(method, filled(path), headers=OWN, data={"csrf": token}),
    }
    assert {who: answer.status_code for who, answer in refused.items()} == dict.fromkeys(refused, 403)
    assert state(api)[0] == before[0]
    assert {entry["action"] for entry in api.admin("GET", f"/v1/audit?after={before[1]}")} <= {"dashboard.sign-in"}


def test_viewers_see_everything_but_no_buttons(api: Api) -> None:
    viewer = Person(api, VIEWER_TOKEN)
    for path in ("/", "/federations/pets", "/audit", "/federations/pets/metrics.csv", "/federations/pets/plan.json"):
        assert viewer.get(path).status_code == 200
    assert "Pause" in Person(api).get("/federations/pets").text
    page = viewer.get("/federations/pets").text
    assert "data-dialog>" not in page
    assert viewer.get("/new").status_code == 403


def test_forms_of_our_pages_are_accepted_by_their_origin_too(api: Api) -> None:
    admin = Person(api)
    token = hidden(admin.get("/federations/pets/invite"), "csrf")
    sent = {"csrf": token, "days": "1"}
    own = admin.http.post("/federations/pets/invite", data=sent, headers={"Origin": "http://testserver"})
    assert own.status_code == 200


def test_the_cookie_is_for_this_site_only_and_out_of_reach_of_scripts(api: Api) -> None:
    plain, secure = Person(api).signed_in, Person(api, base_url="https://testserver").signed_in
    for answer in (plain, secure):
        assert answer.status_code == 303
        parts = answer.headers["Set-Cookie"].lower().split("; ")
        assert {"httponly", "samesite=strict", "path=/", f"max-age={LIFETIME_S}"} <= set(parts)
    assert "Secure" in secure.headers["Set-Cookie"]
    assert "Secure" not in plain.headers["Set-Cookie"]


def test_signing_out_ends_the_session_everywhere(api: Api) -> None:
    admin = Person(api)
    cookie = admin.http.cookies[COOKIE]
    assert admin.http.post("/sign-out", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert admin.http.post("/sign-out", headers=OWN).status_code == 303
    replica = create_app(Settings(api.db_url, ADMIN_TOKEN, viewer_token=VIEWER_TOKEN))
    for app in (api.app, replica):
        answer = TestClient(app, cookies={COOKIE: cookie}, follow_redirects=False).get("/")
        assert (answer.status_code, answer.headers["Location"]) == (303, "/sign-in")


def test_a_new_admin_token_ends_sessions(api: Api) -> None:
    cookie = Person(api).http.cookies[COOKIE]
    other = create_app(Settings(api.db_url, "another-admin-token"))
    assert TestClient(other, cookies={COOKIE: cookie}, follow_redirects=False).get("/").status_code == 303


def test_wrong_tokens_are_explained_and_throttled(tmp_path: Any, request: pytest.FixtureRequest) -> None:
    with open_api(new_database("sqlite", request, tmp_path)) as api:
        stranger = Person(api, None)
        answers = [stranger.sign_in("guess") for _ in range(14)]
        assert answers[0].status_code == 401
        assert "not a token of this coordinator" in answers[0].text
        assert answers[-1].status_code == 429
        assert int(answers[-1].headers["Retry-After"]) >= 1
        assert COOKIE not in stranger.http.cookies
        assert Person(api, None).sign_in(VIEWER_TOKEN).status_code == 429  # there is no viewer token here
        assert api.call("GET", "/v1/federations").status_code == 200


def test_the_admin_signs_in_from_the_admin_networks_only(tmp_path: Any, request: pytest.FixtureRequest) -> None:
    url = new_database("sqlite", request, tmp_path)
    with open_api(url, admin_networks=("192.0.2.0/24",), viewer_token=VIEWER_TOKEN) as api:
        inside, outside = ("192.0.2.7", 1), ("198.51.100.7", 1)
        assert Person(api, client=outside).signed_in.status_code == 403
        assert Person(api, VIEWER_TOKEN, client=outside).get("/").status_code == 200
        cookie = Person(api, client=inside).http.cookies[COOKIE]
        stolen = TestClient(api.app, client=outside, cookies={COOKIE: cookie}, follow_redirects=False)
        assert stolen.get("/").status_code == 403


def test_large_and_strange_bodies_are_refused(api: Api) -> None:
    admin = Person(api)
    json_ = admin.http.post("/federations/pets/pause", json={}, headers=OWN)
    large = admin.http.post("/federations/pets/pause", data={"reason": "x" * 2_000_000}, headers=OWN)
    many = admin.http.post("/new", data={f"f{number}": "x" for number in range(500)}, headers=OWN)
    sign_in = Person(api, None).http.post("/sign-in", data={"token": "x" * 10_000}, headers=OWN)
    assert [answer.status_code for answer in (json_, large, many, sign_in)] == [422, 413, 422, 413]


@pytest.mark.parametrize("wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:x"])
def test_the_sign_in_never_leads_to_another_host(api: Api, wanted: str) -> None:
    stranger = Person(api, None)
    assert hidden(stranger.http.get("/sign-in", params={"next": wanted}), "next") == "/"
    sent = stranger.http.post("/sign-in", data={"token": ADMIN_TOKEN, "next": wanted}, headers=OWN)
    assert sent.headers["Location"] == "/"


def test_the_sign_in_leads_to_the_page_somebody_wanted(api: Api) -> None:
    stranger = Person(api, None)
    asked = stranger.get("/audit?action=client").headers["Location"]
    wanted = hidden(stranger.http.get(asked), "next")
    sent = stranger.http.post(
        "/sign-in", data={"token": ADMIN_TOKEN, "next": wanted.replace("&amp;", "&")}, headers=OWN
    )
    assert sent.headers["Location"] == "/audit?action=client"
