"""Uploads in one request against real databases: accepted exactly once, or refused without a trace."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import select
from support.desk import (
    Desk,
    count,
    fedavg_plan,
    mean_bits,
    put,
    refused,
    unreferenced_blobs,
    update_limit,
)
from support.plans import report, small_plan, update_body, update_tensors
from support.uploads import Sites, bytes_in_use, part, whole

from server.core.errors import (
    Conflict,
    Gone,
    InvalidInput,
    TooLarge,
)
from server.service import deadlines
from server.service.cleaning import Cleaner
from server.service.context import Identity
from server.service.retention import Retention
from server.service.uploads.resumable import OffsetMismatch, status
from server.service.uploads.single_request import SingleRequestUpload
from server.store import blobs
from server.store.database import Database
from server.store.tables import Blob, Transfer, Update
from shared.contract.messages import UpdateReceipt
from shared.tensors.wire import digest, encode

KEEP = Retention()


class TestWholeUpload:
    def test_is_accepted_and_stored_byte_by_byte(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        receipt = desk.put(sites[0], body)
        assert receipt == UpdateReceipt(round=1, digest=digest(body), size_bytes=len(body), received_at=desk.clock.now)
        with desk.db.read() as session:
            update = session.execute(select(Update)).scalar_one()
            blob = session.get_one(Blob, update.blob_id)
        assert (blob.digest, blob.size_bytes) == (digest(body), len(body))
        assert blobs.read_all(desk.db, blob.id) == body
        assert count(desk.db, Transfer) == [0]
        assert desk.round.waiting_for == "waiting for 1 of 2 clients: south; deadline in 60 s"

    def test_may_come_in_pieces_of_any_size(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        upload = SingleRequestUpload(desk.ctx, sites[0], desk.round.id, digest(body), None)
        for begin in range(0, len(body), 777):
            upload.feed(body[begin : begin + 777])
        assert upload.finish().digest == digest(body)
        with desk.db.read() as session:
            blob_id = session.execute(select(Update.blob_id)).scalar_one()
        assert blobs.read_all(desk.db, blob_id or "") == body

    def test_that_is_the_last_closes_the_round(self, desk: Desk, sites: Sites) -> None:
        desk.upload(sites[0], 1)
        desk.upload(sites[1], 2)
        assert (desk.round.state, desk.round.updates) == ("aggregating", 2)
        assert desk.round.waiting_for == "waiting for the aggregation to finish"

    def test_again_gets_the_same_receipt(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        receipt = desk.put(sites[0], body)
        stored = bytes_in_use(desk.db)
        desk.wait(10)
        assert desk.put(sites[0], body) == receipt
        assert bytes_in_use(desk.db) == stored

    def test_again_gets_the_same_receipt_after_the_round(self, desk: Desk, sites: Sites) -> None:
        """An agent that lost the answer asks again, perhaps days later, when even the bytes are gone."""
        body, round_id = desk.body(1), desk.round.id
        receipt = desk.put(sites[0], body)
        desk.upload(sites[1], 2)
        assert desk.put(sites[0], body, round_id) == receipt
        desk.aggregate()
        assert desk.put(sites[0], body, round_id) == receipt
        Cleaner(desk.ctx, Retention(keep_round_uploads=0)).clean()
        desk.restart()
        assert desk.put(sites[0], body, round_id) == receipt

    def test_that_differs_from_the_accepted_one_is_a_conflict(self, desk: Desk, sites: Sites) -> None:
        body, round_id = desk.body(1), desk.round.id
        receipt = desk.put(sites[0], body)
        other = desk.body(99)
        stored = bytes_in_use(desk.db)
        refused(Conflict, "already-uploaded", lambda: desk.put(sites[0], other))
        assert bytes_in_use(desk.db) == stored
        last = desk.body(2)
        desk.put(sites[1], last)
        desk.aggregate()
        refused(Conflict, "already-uploaded", lambda: desk.put(sites[0], other, round_id))
        assert desk.put(sites[0], body, round_id) == receipt
        assert desk.bits(1) == mean_bits([body, last])

    def test_that_comes_late_is_told_the_fate_of_the_round(self, desk: Desk, sites: Sites) -> None:
        body, round_id = desk.body(2), desk.round.id
        desk.upload(sites[0], 1)
        desk.let_pass(60)
        error = refused(Gone, "round-closed", lambda: desk.put(sites[1], body, round_id))
        assert error.message == (
            "Round 1 accepts no more updates: it has closed and is being aggregated. The federation is running."
        )
        desk.aggregate()
        error = refused(Gone, "round-closed", lambda: desk.put(sites[1], body, round_id))
        assert "it is done" in error.message
        second = desk.round.id
        desk.let_pass(60)
        error = refused(Gone, "round-closed", lambda: desk.put(sites[1], body, second))
        assert "it failed: only 0 of 2 updates arrived before the deadline" in error.message
        assert "The federation is paused." in error.message
        assert unreferenced_blobs(desk.db) == set()

    def test_that_loses_the_race_with_the_deadline_is_late(self, desk: Desk, sites: Sites) -> None:
        late = whole(desk, sites[1], desk.body(2))
        desk.upload(sites[0], 1)
        desk.wait(60 + 600)  # beyond the grace period
        deadlines.enforce_deadlines(desk.ctx)
        refused(Gone, "round-closed", late.finish)
        late.abandon()
        assert unreferenced_blobs(desk.db) == set()
        assert count(desk.db, Transfer, Update) == [0, 1]

    def test_past_the_deadline_is_waited_for_while_its_bytes_come(self, desk: Desk, sites: Sites) -> None:
        desk.upload(sites[0], 1)
        body = desk.body(2)
        slow = SingleRequestUpload(desk.ctx, sites[1], desk.round.id, None, len(body))
        for begin in range(0, len(body), 4000):
            slow.feed(body[begin : begin + 4000])
            desk.let_pass(50)
        waiting = "waiting for 1 of 2 clients still uploading after the deadline: south; "
        assert str(desk.round.waiting_for).startswith(waiting)
        slow.finish()
        assert (desk.round.state, desk.round.updates) == ("aggregating", 2)

    def test_past_the_deadline_is_given_up_when_its_bytes_stop(self, desk: Desk, sites: Sites) -> None:
        desk.upload(sites[0], 1)
        whole(desk, sites[1], desk.body(2))
        desk.let_pass(60)
        assert desk.round.state == "aggregating"

    def test_larger_than_any_valid_one_is_refused_before_it_is_read(self, desk: Desk, sites: Sites) -> None:
        limit, before = update_limit(desk.plan), bytes_in_use(desk.db)
        round_id = desk.round.id
        error = refused(
            TooLarge, "too-large", lambda: SingleRequestUpload(desk.ctx, sites[0], round_id, None, limit + 1)
        )
        assert str(limit) in error.message
        assert bytes_in_use(desk.db) == before

    def test_that_hides_its_size_is_cut_off_at_the_limit(self, desk: Desk, sites: Sites) -> None:
        body, before = desk.body(1), bytes_in_use(desk.db)
        endless = body[:8] + body[8:] + b"\0" * update_limit(desk.plan)
        upload = SingleRequestUpload(desk.ctx, sites[0], desk.round.id, None, None)
        refused(TooLarge, "too-large", lambda: upload.feed(endless))
        upload.abandon()
        assert bytes_in_use(desk.db) == before

    def test_repeated_is_cut_off_at_the_limit_too(self, desk: Desk, sites: Sites) -> None:
        desk.upload(sites[0], 1)
        upload = SingleRequestUpload(desk.ctx, sites[0], desk.round.id, None, None)
        refused(TooLarge, "too-large", lambda: upload.feed(b"\0" * (update_limit(desk.plan) + 1)))

    def test_with_another_digest_than_claimed_is_refused(self, desk: Desk, sites: Sites) -> None:
        body, before = desk.body(1), bytes_in_use(desk.db)
        claimed = digest(b"something else")
        step = lambda: put(desk.ctx, sites[0], desk.round.id, body, claimed=claimed)  # noqa: E731 - used once
        refused(InvalidInput, "digest-mismatch", step)
        assert bytes_in_use(desk.db) == before
        assert desk.put(sites[0], body).digest == digest(body)

    def test_interrupted_leaves_nothing(self, desk: Desk, sites: Sites) -> None:
        body, before = desk.body(1), bytes_in_use(desk.db)
        upload = SingleRequestUpload(desk.ctx, sites[0], desk.round.id, None, len(body))
        upload.feed(body[: len(body) // 2])
        assert count(desk.db, Transfer) == [1]
        upload.abandon()
        assert bytes_in_use(desk.db) == before
        upload.abandon()  # idempotent
        refused(Conflict, "upload-replaced", lambda: upload.feed(body[len(body) // 2 :]))
        assert bytes_in_use(desk.db) == before

    def test_interrupted_with_its_process_is_removed_in_time(self, desk: Desk, sites: Sites) -> None:
        before = bytes_in_use(desk.db)
        body = desk.body(1)
        SingleRequestUpload(desk.ctx, sites[0], desk.round.id, None, len(body)).feed(body[:1000])
        desk.restart()
        desk.wait(KEEP.torn_s)
        Cleaner(desk.ctx, KEEP).clean()
        assert count(desk.db, Transfer) == [1]
        desk.wait(1)
        Cleaner(desk.ctx, KEEP).clean()
        assert bytes_in_use(desk.db) == before

    def test_abandoned_after_acceptance_stays_accepted(self, desk: Desk, sites: Sites) -> None:
        upload = whole(desk, sites[0], desk.body(1))
        upload.finish()
        upload.abandon()
        assert count(desk.db, Update) == [1]
        assert unreferenced_blobs(desk.db) == set()

    def test_is_replaced_by_a_newer_one_of_the_same_client(self, desk: Desk, sites: Sites) -> None:
        """An agent that gave up on a request and sends it again must not wait for the old one to time out."""
        body = desk.body(1)
        older = SingleRequestUpload(desk.ctx, sites[0], desk.round.id, None, len(body))
        older.feed(body[:5000])
        newer = whole(desk, sites[0], desk.body(2))
        refused(Conflict, "upload-replaced", lambda: older.feed(body[5000:]))
        older.abandon()
        assert newer.finish().digest == digest(desk.body(2))
        assert count(desk.db, Transfer, Update) == [0, 1]
        assert unreferenced_blobs(desk.db) == set()

    def test_that_was_replaced_cannot_be_finished(self, desk: Desk, sites: Sites) -> None:
        older = whole(desk, sites[0], desk.body(1))
        newer = whole(desk, sites[0], desk.body(2))
        refused(Conflict, "upload-replaced", older.finish)
        older.abandon()
        newer.finish()
        assert count(desk.db, Update) == [1]

    def test_finished_after_its_twin_gets_the_twins_receipt(self, desk: Desk, sites: Sites) -> None:
        """The same body in two concurrent requests: both get the receipt, even if the first closed the round."""
        body, round_id = desk.body(1), desk.round.id
        desk.upload(sites[1], 2)
        older, newer = whole(desk, sites[0], body), whole(desk, sites[0], body)
        receipt = newer.finish()
        assert desk.round.state == "aggregating"
        assert older.finish() == receipt
        assert desk.put(sites[0], body, round_id) == receipt


class TestInvalidUpload:
    """Rejected with the reason, and without a trace."""

    def refuse(self, desk: Desk, who: Identity, body: bytes, code: str, words: str) -> None:
        before = bytes_in_use(desk.db)
        error = refused(InvalidInput, code, lambda: desk.put(who, body))
        assert words in error.message
        assert bytes_in_use(desk.db) == before
        assert desk.put(who, desk.body(1)).round == 1, "a valid one may follow"

    def test_garbage_is_rejected(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], b"\xff" * 5000, "invalid-tensors", "The header claims")

    def test_empty_body_is_rejected(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], b"", "invalid-tensors", "ends inside its header")

    def test_truncated_body_is_rejected(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], desk.body(1)[:-1], "invalid-tensors", "ends 1 bytes too early")

    def test_trailing_bytes_are_rejected(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], desk.body(1) + b"\0", "invalid-tensors", "after its last tensor")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_nonfinite_values_are_rejected(self, desk: Desk, sites: Sites, value: float) -> None:
        tensors = update_tensors(desk.plan, {}, 1)
        next(iter(tensors.values())).view(-1)[3] = value
        body = encode(tensors, {"report": report().model_dump_json()})
        self.refuse(desk, sites[0], body, "invalid-tensors", "not finite")

    def test_update_of_another_plan_is_rejected(self, desk: Desk, sites: Sites) -> None:
        other = small_plan(method={"name": "fedavg"}, image={"channels": 3, "height": 14, "width": 14})
        self.refuse(desk, sites[0], update_body(other, {}, 1), "invalid-tensors", "has shape")

    def test_renamed_tensor_is_rejected(self, desk: Desk, sites: Sites) -> None:
        tensors = update_tensors(desk.plan, {}, 1)
        tensors["shared.backdoor"] = tensors.pop(min(tensors))
        body = encode(tensors, {"report": report().model_dump_json()})
        self.refuse(desk, sites[0], body, "invalid-tensors", "expected tensors; missing: ")

    def test_missing_report_is_rejected(self, desk: Desk, sites: Sites) -> None:
        body = encode(update_tensors(desk.plan, {}, 1))
        self.refuse(desk, sites[0], body, "invalid-report", "no valid training report")

    @pytest.mark.parametrize(
        "text", ["", "null", "{", '{"samples": 0, "batches": 1, "loss": 1, "accuracy": 1, "seconds": 1}', "[1]"]
    )
    def test_unusable_report_is_rejected(self, desk: Desk, sites: Sites, text: str) -> None:
        body = encode(update_tensors(desk.plan, {}, 1), {"report": text})
        self.refuse(desk, sites[0], body, "invalid-report", "no valid training report")

    def test_nonfinite_report_is_rejected(self, desk: Desk, sites: Sites) -> None:
        text = report().model_dump_json().replace('"loss":0.5', '"loss":NaN')
        body = encode(update_tensors(desk.plan, {}, 1), {"report": text})
        self.refuse(desk, sites[0], body, "invalid-report", "no valid training report")


def at_once(*steps: Callable[[], object]) -> list[object]:
    """Run the steps in threads that start together; return their results or exceptions."""
    barrier = Barrier(len(steps))

    def run(step: Callable[[], object]) -> object:
        barrier.wait()
        try:
            return step()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(steps)) as pool:
        return list(pool.map(run, steps))


class TestConcurrentUploads:
    def test_of_all_sites_close_the_round_once(self, clean_db: Database) -> None:
        desk = Desk(clean_db, fedavg_plan(min_clients=6))
        sites = [desk.join(f"site-{number}") for number in range(6)]
        bodies = [desk.body(seed) for seed in range(6)]
        round_id = desk.round.id
        results = at_once(
            *[
                lambda who=who, body=body: put(desk.ctx, who, round_id, body)
                for who, body in zip(sites, bodies, strict=True)
            ]
        )
        assert all(isinstance(result, UpdateReceipt) for result in results), results
        assert desk.round.state == "aggregating"
        desk.aggregate()
        assert desk.bits(1) == mean_bits(bodies)

    def test_of_one_site_leave_one_update(self, desk: Desk, sites: Sites) -> None:
        """The same body many times at once: one is accepted, the others get its receipt or upload-replaced."""
        body, round_id = desk.body(1), desk.round.id
        for _ in range(5):
            results = at_once(*[lambda: put(desk.ctx, sites[0], round_id, body)] * 6)
            receipts = [result for result in results if isinstance(result, UpdateReceipt)]
            replaced = [result for result in results if isinstance(result, Conflict)]
            assert len(receipts) + len(replaced) == 6, results
            assert {error.code for error in replaced} <= {"upload-replaced"}
        assert desk.put(sites[0], body).digest == digest(body)
        assert count(desk.db, Update, Transfer) == [1, 0]
        assert unreferenced_blobs(desk.db) == set()

    def test_in_parts_by_many_requests_leave_one_update(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        results = at_once(*[lambda: part(desk, sites[0], body, 0).finish()] * 6)
        for result in results:
            assert isinstance(result, UpdateReceipt | OffsetMismatch | Conflict), results
        final = part(desk, sites[0], body, status(desk.ctx, sites[0], desk.round.id).offset_bytes).finish()
        assert isinstance(final, UpdateReceipt)
        assert count(desk.db, Update, Transfer) == [1, 0]
        assert unreferenced_blobs(desk.db) == set()
