"""One client against everybody else: absurd numbers, poisoned updates, endless uploads."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import update
from support.api import Api, open_api, problem_of
from support.desk import OPERATOR, TINY_NETWORK, Desk, fedavg_plan, refused
from support.plans import report, small_plan, update_body, update_tensors

from server.core.errors import Conflict
from server.service import downloads, federations, tasks
from server.service.context import Identity, facts_of
from server.service.stored_tensors import load_tensors
from server.service.uploads.resumable import UploadPart
from server.store import blobs
from server.store.database import Database
from server.store.tables import Client, Evaluation
from shared.contract.plan import FederationPlan
from shared.tensors.wire import encode

HUGE = 3e38
_HYPERNETWORK = {"hidden": 8, "hidden_layers": 1}
WITH_STATE = {
    "offset network": TINY_NETWORK,
    "pfedhn": {"name": "pfedhn", **_HYPERNETWORK},
    "pfedhn, mean of uploads": {"name": "pfedhn", "uploads": "mean", **_HYPERNETWORK},
    "pfedhn-pc": {"name": "pfedhn-pc", **_HYPERNETWORK},
}


@pytest.fixture
def api(sqlite_url: str) -> Iterator[Api]:
    with open_api(sqlite_url) as api:
        yield api


def plan_of(name: str = "pets", **rounds: Any) -> FederationPlan:
    return small_plan(name, method={"name": "fedavg"}, rounds={"count": 3, **rounds})


# A JSON parser accepts these, but none is a number of images.
NO_COUNTS = ["true", '"5"', "5.0", "1e3", "-1", str(2**28 + 1), "1" + "0" * 400, "1" + "0" * 5000, "NaN", "null", "[5]"]
NO_LOSSES = ["true", '"5"', "-1", "1.7e308", "1e400", "NaN", "Infinity", "null"]


def send_json(api: Api, method: str, path: str, token: str, text: str) -> int:
    """Send exactly this text, which a JSON library would not write."""
    headers = {"Content-Type": "application/json"}
    return int(api.call(method, path, token, content=text.encode(), headers=headers).status_code)


class TestAbsurdNumbers:
    def test_absurd_evaluations_are_refused_and_end_nothing(self, api: Api) -> None:
        """10^400 of 10^400 correct would reach the target, end the federation, and make its history unreadable."""
        plan = plan_of(target_accuracy=0.9)
        api.create(plan)
        site = api.join(plan, "north", {"cat": 5})
        good = {"samples": "5", "correct": "1", "loss_sum": "1.5", "negatives": "0"}
        bad = [good | {name: text} for name in ("samples", "correct", "negatives") for text in NO_COUNTS]
        bad += [good | {"loss_sum": text} for text in NO_LOSSES] + [good | {"loss_sum": "5000001"}]
        bad += [good | {"samples": "1" + "0" * 400, "correct": "1" + "0" * 400}]
        for fields in bad:
            text = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
            status = send_json(api, "PUT", "/v1/models/0/evaluation", site.token, text)
            assert status in (400, 422), (status, text[:200])
        assert send_json(api, "PUT", "/v1/models/0/evaluation", site.token, json.dumps({**json_of(good)})) == 204
        (round_,) = api.admin("GET", f"/v1/federations/{plan.name}/rounds")
        assert round_["state"] == "open"
        assert api.show(plan.name).state == "running"

    def test_absurd_training_reports_are_refused(self, api: Api) -> None:
        plan = plan_of()
        api.create(plan)
        site = api.join(plan, "north", {"cat": 5})
        task = site.task()
        assert task.round is not None
        tensors, good = update_tensors(plan, {}, 1), json.loads(report().model_dump_json())
        for name, texts in (("samples", NO_COUNTS), ("loss", NO_LOSSES), ("seconds", NO_LOSSES)):
            for text in texts:
                whole = json.dumps(good | {name: "HERE"}).replace('"HERE"', text)
                answer = site.put(task.round.id, encode(tensors, {"report": whole}))
                assert problem_of(answer) == (422, "invalid-report"), (name, text[:100])
        assert site.put(task.round.id, encode(tensors, {"report": json.dumps(good)})).status_code == 200

    @pytest.mark.parametrize("text", [*NO_COUNTS[:-2], "[5]"])
    def test_absurd_class_counts_are_refused(self, api: Api, text: str) -> None:
        plan = plan_of()
        api.create(plan)
        site = api.join(plan, "north", {"cat": 5})
        invite = api.admin("POST", f"/v1/federations/{plan.name}/invites")["token"]
        for field in (f'"class_counts": {{"cat": {text}}}', f'"class_counts": {{"cat": 1}}, "held_out_images": {text}'):
            for method, path, token, rest in (
                ("POST", "/v1/join", invite, '"name": "south", '),
                ("PATCH", "/v1/me", site.token, ""),
            ):
                assert send_json(api, method, path, token, f"{{{rest}{field}}}") in (400, 422), field[:100]
        assert api.call("GET", "/v1/me", site.token).json()["class_counts"] == {"cat": 5, "dog": 0}

    def test_evaluations_cannot_exceed_the_registered_held_out_images(self, api: Api) -> None:
        plan = plan_of()
        api.create(plan)
        site = api.join(plan, "north", {"cat": 5})
        claim = {"samples": 101, "correct": 101, "loss_sum": 0.0}
        answer = api.call("PUT", "/v1/models/0/evaluation", site.token, json=claim)
        assert problem_of(answer) == (422, "too-many-samples")
        assert "101 images, but this client registered 100 held-out images" in answer.json()["detail"]
        assert "held_out_images" in answer.json()["next_step"]
        counts = {"class_counts": {"cat": 5}, "held_out_images": 101}
        assert api.call("PATCH", "/v1/me", site.token, json=counts).json()["held_out_images"] == 101
        assert api.call("PUT", "/v1/models/0/evaluation", site.token, json=claim).status_code == 204
        with api.app.state.ctx.db.write() as session:
            session.execute(update(Client).values(held_out_images=None))  # as for an agent of an older release
        assert api.call("PUT", "/v1/models/0/evaluation", site.token, json=claim).status_code == 422

    def test_absurd_numbers_stored_by_an_older_release_break_nothing(self, api: Api) -> None:
        """Neither their federation nor any other."""
        bad, good = plan_of("bad", min_clients=2, target_accuracy=0.99, patience=1), plan_of("good")
        sites = []
        for plan, names in ((bad, ("north", "south")), (good, ("north",))):
            api.create(plan)
            sites += [(plan, api.join(plan, name, {"cat": 5})) for name in names]
        ids = [api.call("GET", "/v1/me", site.token).json()["id"] for plan, site in sites if plan is bad]
        stored = [
            {"samples": 10**400, "correct": 10**400, "loss_sum": 1.0},
            {"samples": 5, "correct": 1, "loss_sum": 1.7e308},
        ]
        with api.app.state.ctx.db.write() as session:
            for client_id, result in zip(ids, stored, strict=True):
                row = Evaluation(client_id=client_id, result=json.dumps(result), received_at=0.0)
                row.federation_id, row.model_number = 1, 0
                session.add(row)
        for plan, site in sites:
            task = site.task()
            assert task.round is not None
            assert site.put(task.round.id, update_body(plan, {}, 1)).status_code == 200
        for _, site in sites:
            site.wait_for_round(2)
        assert [view["rounds_done"] for view in api.admin("GET", "/v1/federations")] == [1, 1]
        assert api.show("bad").best_accuracy is None
        for path in ("rounds", "metrics.csv"):
            assert api.call("GET", f"/v1/federations/bad/{path}").status_code == 200


def json_of(fields: dict[str, str]) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in fields.items()}


class TestWeight:
    def test_weight_is_what_the_client_registered_not_what_its_update_claims(self, clean_db: Database) -> None:
        """A site with 10 images that reports 2^28 must not dominate the model."""
        desk = Desk(clean_db, small_plan(averaging="samples", method={"name": "fedavg"}, rounds={"min_clients": 2}))
        liar, honest = desk.join("liar", cat=10), desk.join("honest", cat=30)
        for who, value, claimed in ((liar, 8.0, 2**28), (honest, 0.0, 30)):
            desk.put(who, constant(desk, value, samples=claimed))
        desk.aggregate()
        assert all(bool((tensor == 2.0).all()) for tensor in desk.model(1).values())


def constant(desk: Desk, value: float, samples: int = 10) -> bytes:
    """Return an update for the open round in which every number is this one."""
    facts = facts_of(desk.rounds()[-1].facts)
    tensors = {name: torch.full_like(t, value) for name, t in update_tensors(desk.plan, facts, 0).items()}
    return encode(tensors, {"report": report(samples).model_dump_json()})


class TestPoisonedUpdate:
    """3e38 is finite, but what the coordinator computes from it is not."""

    @pytest.mark.parametrize("method", WITH_STATE.values(), ids=WITH_STATE.keys())
    def test_poisoned_updates_never_become_part_of_the_server_state(
        self, clean_db: Database, method: dict[str, Any]
    ) -> None:
        desk = Desk(clean_db, small_plan(method=method, rounds={"count": 3, "min_clients": 2}))
        good, bad = desk.join("good", cat=5), desk.join("bad", dog=5)
        desk.run_round({good: 1, bad: 2})
        before = desk.bits(), desk.private_bits()
        desk.upload(good, 3)
        desk.put(bad, constant(desk, HUGE))
        desk.aggregate()
        assert desk.view.state == "paused"
        reason, detail = "round 2 failed: its result is not finite", "the update from 'bad' has "
        assert desk.view.reason.startswith(reason)
        assert f"{detail}values up to 3e+38" in desk.view.reason
        assert tasks.task(desk.ctx, good).reason == reason, "other clients do not learn whose it was"
        assert (desk.bits(), desk.private_bits()) == before
        assert [model.number for model in desk.models()] == [0, 1]

        federations.resume(desk.ctx, OPERATOR, desk.name)
        desk.run_round({good: 4, bad: 5})
        assert (desk.view.rounds_done, desk.models()[-1].number) == (2, 3)
        private = load_tensors(clean_db, desk.models()[-1].private_blob_id or "")
        assert all(bool(np.isfinite(value).all()) for value in private.values())

    def test_poisoned_state_is_never_sent_to_a_client(self, clean_db: Database) -> None:
        """An older release may have stored it; no tensors are better than broken ones."""
        desk = Desk(clean_db, small_plan(method=WITH_STATE["pfedhn"], rounds={"count": 3}))
        north = desk.join("north")
        broken = load_tensors(clean_db, desk.models()[0].private_blob_id or "")
        broken = {name: np.full_like(value, np.nan) for name, value in broken.items()}
        blob_id = blobs.store(clean_db, encode(broken))
        with clean_db.write() as session:
            model = session.merge(desk.models()[0])
            model.private_blob_id = blob_id
        refused(Conflict, "not-finite", lambda: downloads.round_personal(desk.ctx, north, desk.round.id))


class TestUploadThatNeverEnds:
    """After the deadline, a round waits only for uploads that grow."""

    @pytest.fixture
    def desk(self, clean_db: Database) -> Desk:
        return Desk(clean_db, fedavg_plan(min_clients=2, quorum=0.5, upload_idle_s=60, upload_grace_s=6 * 3600))

    @staticmethod
    def begin(desk: Desk, who: Identity, number: int, data: bytes) -> None:
        """Start a new upload, by its digest, with its first bytes."""
        part = UploadPart(desk.ctx, who, desk.round.id, 0, 1000, f"{number:064x}")
        part.feed(data)
        part.finish()

    def hold_open(self, desk: Desk, send: Callable[[Identity, int], None]) -> None:
        good, bad = desk.join("good"), desk.join("bad")
        desk.upload(good, 1)
        desk.let_pass(30)
        for number in range(6):
            if desk.round.state == "open":
                send(bad, number)
            desk.let_pass(30)
        assert desk.round.state == "aggregating"

    def test_empty_parts_with_new_digests_do_not_delay_the_round(self, desk: Desk) -> None:
        self.hold_open(desk, lambda who, number: self.begin(desk, who, number, b""))

    def test_single_bytes_of_new_uploads_do_not_delay_the_round(self, desk: Desk) -> None:
        self.hold_open(desk, lambda who, number: self.begin(desk, who, number, b"x"))

    def test_empty_parts_of_one_upload_do_not_delay_the_round(self, desk: Desk) -> None:
        def send(who: Identity, number: int) -> None:
            offset = min(number, 1)
            part = UploadPart(desk.ctx, who, desk.round.id, offset, 1000, "0" * 64)
            part.feed(b"" if number else b"x")
            part.finish()

        self.hold_open(desk, send)

    def test_a_growing_upload_is_waited_for(self, desk: Desk) -> None:
        good, slow = desk.join("good"), desk.join("slow")
        desk.upload(good, 1)
        for number in range(6):
            part = UploadPart(desk.ctx, slow, desk.round.id, number, 1000, "0" * 64)
            part.feed(b"x")
            part.finish()
            desk.let_pass(30)
        assert desk.round.state == "open"
