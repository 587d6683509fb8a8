"""What the dashboard's pages show and do, with real coordinators on both databases."""

import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from sqlalchemy import insert, select
from support.api import SocketApi
from support.busy_coordinator import NAMES, Busy, busy
from support.databases import KINDS, new_database
from support.many_rows import copy_round, statements
from support.plans import small_plan
from support.signed_in import VIEWER_TOKEN, Person

from server.dashboard import federation as page
from server.service.insights.markers import coordinator_marker, federation_marker
from server.store.tables import Client
from shared.contract.plan import FederationPlan


@pytest.fixture(scope="module", params=KINDS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    url = new_database(request.param, request, tmp_path_factory.mktemp("pages"))
    with SocketApi(url, viewer_token=VIEWER_TOKEN, requests_per_s=0) as api:
        yield busy(api, rounds=3)


@pytest.fixture
def admin(scene: Busy) -> Person:
    return Person(scene.api)


def test_the_federation_page_shows_its_sites_rounds_and_measurements(scene: Busy, admin: Person) -> None:
    scene.api.app.state.heartbeats.flush(scene.api.app.state.ctx)
    text = admin.get("/federations/lung-nodules").text
    for name in NAMES:
        assert name in text
    for shown in (
        "Round 4 is open: 4 of 6 sites have uploaded",
        "Accuracy on held-out images",
        "Joining pays off at",
        "Training images per site and class",
        "Round 4, by site",
        "Round 3 aggregated · 6 of 6 sites",
        "3 images cannot be read.",
        "training round 4",
        "metrics.csv",
    ):
        assert shown in text, shown
    assert "style=" not in text
    assert "<script>" not in text


def test_pictures_of_the_page_are_well_formed_and_described(admin: Person) -> None:
    text = admin.get("/federations/lung-nodules").text
    pictures = re.findall(r"<svg xmlns.*?</svg>", text, re.DOTALL)
    assert len(pictures) > 6
    for picture in pictures:
        assert ElementTree.fromstring(picture).get("aria-label")  # noqa: S314 - our own output


def test_an_unchanged_page_costs_a_marker_and_no_rendering(scene: Busy, admin: Person) -> None:
    db = scene.api.app.state.ctx.db
    first = admin.get("/federations/lung-nodules")
    with statements(db) as seen:
        again = admin.get("/federations/lung-nodules", **{"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert sum("FROM" in one for one in seen) <= 5


def test_markers_change_with_what_pages_show(scene: Busy) -> None:
    ctx = scene.api.app.state.ctx
    before = federation_marker(ctx, "lung-nodules"), coordinator_marker(ctx)
    scene.measure(4, 3)
    measured = federation_marker(ctx, "lung-nodules")
    scene.api.create(small_plan("another"), start=False)
    assert before[0] != measured
    assert before[1] != coordinator_marker(ctx)


def test_the_number_of_statements_does_not_grow_with_sites_and_rounds(scene: Busy) -> None:
    ctx = scene.api.app.state.ctx
    page.load(ctx, "lung-nodules")
    with statements(ctx.db) as few:
        page.load(ctx, "lung-nodules")
    copy_round(ctx.db, 2, 60)
    with ctx.db.write() as session:
        row = dict(session.execute(select(Client.__table__).where(Client.name == "east-clinic")).mappings().one())
        copies = [{**row, "id": f"copy{number}", "name": f"copy-{number}"} for number in range(80)]
        session.execute(insert(Client), copies)
    with statements(ctx.db) as many:
        found = page.load(ctx, "lung-nodules")
    assert found["site_count"] == 86
    assert found["pages"] == 2
    assert abs(len(many) - len(few)) <= 2  # verdicts of the newest models need a second look


def test_names_from_the_network_are_escaped(scene: Busy, admin: Person) -> None:
    scene.report_status(1, "training", "<script>alert(1)</script>", ("<b>", "<img src=x onerror=alert(2)>"))
    scene.api.app.state.heartbeats.flush(scene.api.app.state.ctx)
    text = admin.get("/federations/lung-nodules").text
    assert "&lt;script&gt;alert(1)" in text
    assert "<img src=x" not in text


def federation(scene: Busy, name: str, *, start: bool = True) -> FederationPlan:
    plan = small_plan(name)
    scene.api.create(plan, start=start)
    return plan


def test_operators_start_pause_resume_and_cancel(scene: Busy, admin: Person) -> None:
    federation(scene, "controls", start=False)
    for action, fields, wanted in (
        ("start", {}, "running"),
        ("pause", {"reason": "moving the server room"}, "paused"),
        ("resume", {}, "running"),
        ("cancel", {}, "cancelled"),
    ):
        answer = admin.fill(f"/federations/controls/{action}", **fields)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/federations/controls")
        assert scene.api.show("controls").state == wanted
    entries = scene.api.admin("GET", "/v1/audit?federation=controls&limit=1000")
    acted = [(entry["actor"], entry["action"]) for entry in entries if entry["actor"] == "admin:dashboard"]
    assert acted == [("admin:dashboard", f"federation.{verb}") for verb in ("start", "pause", "resume", "cancel")]
    refused = admin.fill("/federations/controls/start")
    assert refused.status_code == 409
    assert "was cancelled and can no longer be started" in refused.text


def test_deleting_needs_the_name(scene: Busy, admin: Person) -> None:
    federation(scene, "to-delete", start=False)
    assert admin.fill("/federations/to-delete/delete", confirm="another").status_code == 422
    answer = admin.fill("/federations/to-delete/delete", confirm="to-delete")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    assert admin.get("/federations/to-delete").status_code == 404


def test_an_invite_is_shown_once_with_the_command_that_uses_it(scene: Busy, admin: Person) -> None:
    plan = federation(scene, "inviting")
    assert admin.fill("/federations/inviting/invite", days="soon").status_code == 422
    answer = admin.fill("/federations/inviting/invite", days="2", note="Hospital <North>")
    found = re.search(r"DISTRANS_INVITE=(dti_\S+) distrans-agent join --server http://testserver", answer.text)
    assert found
    joined = scene.api.http.post(
        "/v1/join", json={"name": "north", "class_counts": {"cat": 1}}, headers={"Authorization": f"Bearer {found[1]}"}
    )
    assert joined.status_code == 201
    admin.fill("/federations/inviting/invite", days="2", note="Hospital <North>")
    text = admin.get(f"/federations/{plan.name}").text
    assert "Hospital &lt;North&gt;" in text
    assert "dti_" not in text


def test_operators_revoke_clients_and_invites_and_rotate_tokens(scene: Busy, admin: Person) -> None:
    plan = federation(scene, "revoking")
    site = scene.api.join(plan, "north", {"cat": 1})
    rotated = admin.fill("/federations/revoking/clients/north/rotate")
    assert "dtc_" in rotated.text
    assert scene.api.http.get("/v1/me", headers=site.headers).status_code == 401
    assert admin.fill("/federations/revoking/clients/north/revoke").status_code == 303
    assert scene.api.admin("GET", "/v1/federations/revoking/clients")[0]["state"] == "revoked"
    invite = scene.api.admin("POST", "/v1/federations/revoking/invites")["id"]
    assert admin.fill(f"/federations/revoking/invites/{invite}/revoke").status_code == 303
    states = {one["id"]: one["state"] for one in scene.api.admin("GET", "/v1/federations/revoking/invites")}
    assert states[invite] == "revoked"


def test_operators_roll_back(admin: Person) -> None:
    assert admin.fill("/federations/lung-nodules/rollback", to="99999").status_code == 409
    assert admin.fill("/federations/lung-nodules/rollback", to="one").status_code == 422


def test_an_invalid_plan_is_explained_next_to_its_fields(admin: Person) -> None:
    sent = {
        "name": "bad name",
        "classes": "one",
        "preset": "paper",
        "rounds.count": "many",
        "model.backbone": "alexnet",
        "image.height": "20",
        "method": "distrans",
        "method settings": "alpha = 7\nbeta = 1",
    }
    answer = admin.fill("/new", **sent)
    assert answer.status_code == 422
    found = dict(re.findall(r'<p class="error" id="([^"]*)-error">(.*?)</p>', answer.text))
    assert set(found) == {"name", "classes", "rounds.count", "model.backbone", "method settings"}
    assert "must be a whole number" in found["rounds.count"]
    assert "needs images of at least 63×63" in found["model.backbone"]
    assert 'value="bad name"' in answer.text
    assert "alpha = 7\nbeta = 1</textarea>" in answer.text


def test_a_federation_is_created_from_the_form(scene: Busy, admin: Person) -> None:
    sent = {
        "name": "from-a-form",
        "classes": "benign\r\n malignant \r\n",
        "preset": "offset-dropout",
        "rounds.count": "7",
        "rounds.target_accuracy": "0.9",
        "image.channels": "1",
        "image.mean": "0.4",
        "image.height": "14",
        "image.width": "14",
        "averaging": "samples",
        "method settings": "alpha = 0.2",
    }
    answer = admin.fill("/new", **sent)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/federations/from-a-form")
    plan = scene.api.show("from-a-form").plan
    assert plan is not None
    assert (plan.classes, plan.rounds.count, plan.rounds.target_accuracy) == (("benign", "malignant"), 7, 0.9)
    assert (plan.image.shape, plan.image.mean, plan.averaging) == ((1, 14, 14), (0.4,), "samples")
    assert plan.method.model_dump()["alpha"] == 0.2
    assert "already exists" in admin.fill("/new", **sent).text
    assert json.loads(admin.get("/federations/from-a-form/plan.json").text)["seed"] == 0


def test_the_audit_log_has_filters_and_pages(scene: Busy, admin: Person) -> None:
    federation(scene, "audited")
    rows = admin.get("/audit?federation=audited").text
    assert rows.count("<tr><td>") == 2
    assert admin.get("/audit?federation=audited&action=federation.start").text.count("<tr><td>") == 1
    assert "No entries" in admin.get("/audit?actor=nobody").text
    assert admin.get("/audit?actor=%25&before=5").status_code == 200


def test_downloads_have_names(admin: Person) -> None:
    model = admin.get("/federations/lung-nodules/model.safetensors?round=1")
    assert model.headers["Content-Disposition"] == 'attachment; filename="lung-nodules.safetensors"'
    assert len(model.content) > 1000
    assert admin.get("/federations/lung-nodules/metrics.csv").text.startswith("round,state,client")


def test_unknown_federations_and_rounds_are_explained_on_a_page(admin: Person) -> None:
    missing = admin.get("/federations/lung-nodule")
    assert missing.status_code == 404
    assert "did you mean" in missing.text
    assert missing.headers["Content-Type"].startswith("text/html")
    assert admin.get("/federations/lung-nodules?round=77777").status_code == 404
