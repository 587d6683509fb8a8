"""Uploads, whole and in parts, against real databases: accepted exactly once, or refused without a trace."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from sqlalchemy import select
from support.plans import report, small_plan, update_body, update_tensors
from support.service import OPERATOR, Desk, count, fedavg_plan, mean_bits, put, unreferenced_blobs, update_limit

from server.core.errors import (
    Conflict,
    CoordinatorError,
    Gone,
    InvalidInput,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    TooLarge,
)
from server.service import enrolment, federations, housekeeping
from server.service.cleaning import Cleaner, Retention
from server.service.context import Context
from server.service.enrolment import Identity
from server.service.resumable_uploads import OffsetMismatch, UploadPart, UploadStatus, status
from server.service.uploads import Upload
from server.store import blobs
from server.store.session import Database
from server.store.tables import Blob, BlobChunk, Transfer, Update
from shared.schemas import JoinRequest, UpdateReceipt
from shared.wire import digest, encode

Sites = tuple[Identity, Identity]
KEEP = Retention()


@pytest.fixture
def desk(clean_db: Database) -> Desk:
    return Desk(clean_db, fedavg_plan(min_clients=2, upload_idle_s=60, upload_grace_s=600, quorum=0.5))


@pytest.fixture
def sites(desk: Desk) -> Sites:
    """North and south, both taking part in round 1."""
    return desk.join("north"), desk.join("south")


def bytes_in_use(db: Database) -> list[int]:
    """What an upload without success must not change."""
    return count(db, Blob, BlobChunk, Transfer, Update)


def whole(desk: Desk, who: Identity, body: bytes, round_id: int | None = None) -> Upload:
    """A PUT whose bytes have all come."""
    upload = Upload(desk.ctx, who, round_id or desk.round.id, None, len(body))
    upload.feed(body)
    return upload


def part(desk: Desk, who: Identity, body: bytes, begin: int, end: int | None = None) -> UploadPart:
    """A PATCH that brings the bytes from begin to end."""
    request = UploadPart(desk.ctx, who, desk.round.id, begin, len(body), digest(body))
    if body[begin:end]:
        request.feed(body[begin:end])
    return request


def refused(kind: type[CoordinatorError], code: str, step: Callable[[], object]) -> CoordinatorError:
    with pytest.raises(kind) as caught:
        step()
    assert caught.value.code == code
    return caught.value


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
        upload = Upload(desk.ctx, sites[0], desk.round.id, digest(body), None)
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
        """An agent whose answer was lost asks again, perhaps days later, when even the bytes are gone."""
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
            "Round 1 takes no more updates: it closed and is being aggregated. The federation is running."
        )
        desk.aggregate()
        error = refused(Gone, "round-closed", lambda: desk.put(sites[1], body, round_id))
        assert "it is done" in error.message
        second = desk.round.id
        desk.let_pass(60)
        error = refused(Gone, "round-closed", lambda: desk.put(sites[1], body, second))
        assert "it failed: only 0 of 2 updates came before the deadline" in error.message
        assert "The federation is paused." in error.message
        assert unreferenced_blobs(desk.db) == set()

    def test_that_loses_the_race_with_the_deadline_is_late(self, desk: Desk, sites: Sites) -> None:
        late = whole(desk, sites[1], desk.body(2))
        desk.upload(sites[0], 1)
        desk.wait(60 + 600)  # the grace is over too
        housekeeping.pass_deadlines(desk.ctx)
        refused(Gone, "round-closed", late.finish)
        late.abandon()
        assert unreferenced_blobs(desk.db) == set()
        assert count(desk.db, Transfer, Update) == [0, 1]

    def test_past_the_deadline_is_waited_for_while_its_bytes_come(self, desk: Desk, sites: Sites) -> None:
        desk.upload(sites[0], 1)
        body = desk.body(2)
        slow = Upload(desk.ctx, sites[1], desk.round.id, None, len(body))
        for begin in range(0, len(body), 4000):
            slow.feed(body[begin : begin + 4000])
            desk.let_pass(50)
        waiting = "waiting for 1 of 2 clients that still upload past the deadline: south; "
        assert str(desk.round.waiting_for).startswith(waiting)
        slow.finish()
        assert (desk.round.state, desk.round.updates) == ("aggregating", 2)

    def test_past_the_deadline_is_torn_when_its_bytes_stop(self, desk: Desk, sites: Sites) -> None:
        desk.upload(sites[0], 1)
        whole(desk, sites[1], desk.body(2))
        desk.let_pass(60)
        assert desk.round.state == "aggregating"

    def test_larger_than_any_valid_one_is_refused_before_it_is_read(self, desk: Desk, sites: Sites) -> None:
        limit, before = update_limit(desk.plan), bytes_in_use(desk.db)
        round_id = desk.round.id
        error = refused(TooLarge, "too-large", lambda: Upload(desk.ctx, sites[0], round_id, None, limit + 1))
        assert str(limit) in error.message
        assert bytes_in_use(desk.db) == before

    def test_that_hides_its_size_is_cut_off_at_the_limit(self, desk: Desk, sites: Sites) -> None:
        body, before = desk.body(1), bytes_in_use(desk.db)
        endless = body[:8] + body[8:] + b"\0" * update_limit(desk.plan)
        upload = Upload(desk.ctx, sites[0], desk.round.id, None, None)
        refused(TooLarge, "too-large", lambda: upload.feed(endless))
        upload.abandon()
        assert bytes_in_use(desk.db) == before

    def test_repeated_is_cut_off_at_the_limit_too(self, desk: Desk, sites: Sites) -> None:
        desk.upload(sites[0], 1)
        upload = Upload(desk.ctx, sites[0], desk.round.id, None, None)
        refused(TooLarge, "too-large", lambda: upload.feed(b"\0" * (update_limit(desk.plan) + 1)))

    def test_with_another_digest_than_claimed_is_refused(self, desk: Desk, sites: Sites) -> None:
        body, before = desk.body(1), bytes_in_use(desk.db)
        claimed = digest(b"something else")
        step = lambda: put(desk.ctx, sites[0], desk.round.id, body, claimed=claimed)  # noqa: E731 - used once
        refused(InvalidInput, "digest-mismatch", step)
        assert bytes_in_use(desk.db) == before
        assert desk.put(sites[0], body).digest == digest(body)

    def test_torn_leaves_nothing(self, desk: Desk, sites: Sites) -> None:
        body, before = desk.body(1), bytes_in_use(desk.db)
        upload = Upload(desk.ctx, sites[0], desk.round.id, None, len(body))
        upload.feed(body[: len(body) // 2])
        assert count(desk.db, Transfer) == [1]
        upload.abandon()
        assert bytes_in_use(desk.db) == before
        upload.abandon()  # twice is once
        refused(Conflict, "upload-replaced", lambda: upload.feed(body[len(body) // 2 :]))
        assert bytes_in_use(desk.db) == before

    def test_torn_together_with_its_process_is_dropped_in_time(self, desk: Desk, sites: Sites) -> None:
        before = bytes_in_use(desk.db)
        body = desk.body(1)
        Upload(desk.ctx, sites[0], desk.round.id, None, len(body)).feed(body[:1000])
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
        """An agent that gave up on a request and sends again must not wait for the old one to time out."""
        body = desk.body(1)
        older = Upload(desk.ctx, sites[0], desk.round.id, None, len(body))
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
        """The same body in two requests at once: one is accepted, both are told so, even when that closed the round."""
        body, round_id = desk.body(1), desk.round.id
        desk.upload(sites[1], 2)
        older, newer = whole(desk, sites[0], body), whole(desk, sites[0], body)
        receipt = newer.finish()
        assert desk.round.state == "aggregating"
        assert older.finish() == receipt
        assert desk.put(sites[0], body, round_id) == receipt


class TestInvalidUpload:
    """Refused with the reason, and without a trace."""

    def refuse(self, desk: Desk, who: Identity, body: bytes, code: str, words: str) -> None:
        before = bytes_in_use(desk.db)
        error = refused(InvalidInput, code, lambda: desk.put(who, body))
        assert words in error.message
        assert bytes_in_use(desk.db) == before
        assert desk.put(who, desk.body(1)).round == 1, "a valid one may follow"

    def test_no_safetensors(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], b"\xff" * 5000, "invalid-tensors", "The header claims")

    def test_empty(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], b"", "invalid-tensors", "ends inside its header")

    def test_cut_short(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], desk.body(1)[:-1], "invalid-tensors", "ends 1 bytes too early")

    def test_too_long(self, desk: Desk, sites: Sites) -> None:
        self.refuse(desk, sites[0], desk.body(1) + b"\0", "invalid-tensors", "after its last tensor")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_not_finite(self, desk: Desk, sites: Sites, value: float) -> None:
        tensors = update_tensors(desk.plan, {}, 1)
        next(iter(tensors.values())).view(-1)[3] = value
        body = encode(tensors, {"report": report().model_dump_json()})
        self.refuse(desk, sites[0], body, "invalid-tensors", "not finite")

    def test_of_another_plan(self, desk: Desk, sites: Sites) -> None:
        other = small_plan(method={"name": "fedavg"}, image={"channels": 3, "height": 14, "width": 14})
        self.refuse(desk, sites[0], update_body(other, {}, 1), "invalid-tensors", "has shape")

    def test_with_a_tensor_too_few_and_one_too_many(self, desk: Desk, sites: Sites) -> None:
        tensors = update_tensors(desk.plan, {}, 1)
        tensors["shared.backdoor"] = tensors.pop(min(tensors))
        body = encode(tensors, {"report": report().model_dump_json()})
        self.refuse(desk, sites[0], body, "invalid-tensors", "lacks 1 tensors")

    def test_without_a_report(self, desk: Desk, sites: Sites) -> None:
        body = encode(update_tensors(desk.plan, {}, 1))
        self.refuse(desk, sites[0], body, "invalid-report", "no valid training report")

    @pytest.mark.parametrize(
        "text", ["", "null", "{", '{"samples": 0, "batches": 1, "loss": 1, "accuracy": 1, "seconds": 1}', "[1]"]
    )
    def test_with_a_report_that_cannot_be_used(self, desk: Desk, sites: Sites, text: str) -> None:
        body = encode(update_tensors(desk.plan, {}, 1), {"report": text})
        self.refuse(desk, sites[0], body, "invalid-report", "no valid training report")

    def test_with_a_report_that_is_not_finite(self, desk: Desk, sites: Sites) -> None:
        text = report().model_dump_json().replace('"loss":0.5', '"loss":NaN')
        body = encode(update_tensors(desk.plan, {}, 1), {"report": text})
        self.refuse(desk, sites[0], body, "invalid-report", "no valid training report")


class TestResumableUpload:
    def test_goes_on_where_the_stored_bytes_end(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        assert status(desk.ctx, sites[0], desk.round.id) == UploadStatus(0, None, complete=False)
        assert part(desk, sites[0], body, 0, 5000).finish() == UploadStatus(5000, len(body), complete=False)
        assert status(desk.ctx, sites[0], desk.round.id) == UploadStatus(5000, len(body), complete=False)
        assert part(desk, sites[0], body, 5000, 9000).finish() == UploadStatus(9000, len(body), complete=False)
        receipt = part(desk, sites[0], body, 9000).finish()
        assert receipt == UpdateReceipt(round=1, digest=digest(body), size_bytes=len(body), received_at=desk.clock.now)
        assert status(desk.ctx, sites[0], desk.round.id) == UploadStatus(len(body), len(body), complete=True)
        with desk.db.read() as session:
            blob_id = session.execute(select(Update.blob_id)).scalar_one()
        assert blobs.read_all(desk.db, blob_id or "") == body
        assert count(desk.db, Transfer) == [0]

    def test_counts_like_a_whole_one(self, desk: Desk, sites: Sites) -> None:
        bodies = [desk.body(1), desk.body(2)]
        part(desk, sites[0], bodies[0], 0, 10).finish()
        part(desk, sites[0], bodies[0], 10).finish()
        desk.put(sites[1], bodies[1])
        desk.aggregate()
        assert desk.bits(1) == mean_bits(bodies)

    def test_outlives_the_coordinator(self, desk: Desk, sites: Sites) -> None:
        """Another process, with nothing but the database, takes the rest."""
        body, round_id = desk.body(1), desk.round.id
        part(desk, sites[0], body, 0, 7777)  # torn: no finish
        reopened = Database(desk.db.url.render_as_string(hide_password=False))
        ctx = Context(reopened, desk.clock)
        assert status(ctx, sites[0], round_id) == UploadStatus(7777, len(body), complete=False)
        rest = UploadPart(ctx, sites[0], round_id, 7777, len(body), digest(body))
        rest.feed(body[7777:])
        assert isinstance(rest.finish(), UpdateReceipt)
        reopened.close()

    def test_whose_last_byte_came_before_a_crash_needs_no_more_bytes(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        part(desk, sites[0], body, 0)  # all bytes are stored, but the process died before it checked them
        desk.restart()
        assert status(desk.ctx, sites[0], desk.round.id) == UploadStatus(len(body), len(body), complete=False)
        assert isinstance(part(desk, sites[0], body, len(body)).finish(), UpdateReceipt)

    @pytest.mark.parametrize("offset", [0, 4999, 5001, 10**9])
    def test_from_another_offset_is_told_the_right_one(self, desk: Desk, sites: Sites, offset: int) -> None:
        body = desk.body(1)
        part(desk, sites[0], body, 0, 5000)
        with pytest.raises(OffsetMismatch) as caught:
            UploadPart(desk.ctx, sites[0], desk.round.id, offset, len(body), digest(body))
        assert caught.value.offset_bytes == 5000
        assert status(desk.ctx, sites[0], desk.round.id).offset_bytes == 5000

    def test_that_was_never_begun_starts_at_zero(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        with pytest.raises(OffsetMismatch) as caught:
            part(desk, sites[0], body, 100)
        assert caught.value.offset_bytes == 0
        assert count(desk.db, Transfer) == [0]

    def test_by_two_requests_at_once_is_not_mixed_up(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        slow = part(desk, sites[0], body, 0, 1000)
        fast = part(desk, sites[0], body, 1000, 3000)
        with pytest.raises(OffsetMismatch) as caught:
            slow.feed(body[1000:2000])
        assert caught.value.offset_bytes == 3000
        fast.feed(body[3000:])
        assert isinstance(fast.finish(), UpdateReceipt)

    def test_completed_by_two_requests_at_once_has_one_receipt(self, desk: Desk, sites: Sites) -> None:
        """An agent that timed out while its bytes were being checked asks again with an empty part."""
        body = desk.body(1)
        desk.upload(sites[1], 2)
        first = part(desk, sites[0], body, 0)
        again = part(desk, sites[0], body, len(body))
        receipt = again.finish()
        assert isinstance(receipt, UpdateReceipt)
        assert first.finish() == receipt
        assert count(desk.db, Update) == [2]

    def test_with_more_bytes_than_announced_keeps_what_was_right(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        request = part(desk, sites[0], body, 0, 5000)
        refused(InvalidInput, "too-many-bytes", lambda: request.feed(body[5000:] + b"\0"))
        assert status(desk.ctx, sites[0], desk.round.id).offset_bytes == 5000
        assert isinstance(part(desk, sites[0], body, 5000).finish(), UpdateReceipt)

    def test_that_turns_out_invalid_is_dropped(self, desk: Desk, sites: Sites) -> None:
        before = bytes_in_use(desk.db)
        tensors = {
            name: torch.full_like(value, float("nan")) for name, value in update_tensors(desk.plan, {}, 1).items()
        }
        body = encode(tensors, {"report": report().model_dump_json()})
        part(desk, sites[0], body, 0, 5000)
        refused(InvalidInput, "invalid-tensors", part(desk, sites[0], body, 5000).finish)
        assert bytes_in_use(desk.db) == before
        assert status(desk.ctx, sites[0], desk.round.id) == UploadStatus(0, None, complete=False)

    def test_without_a_report_is_dropped(self, desk: Desk, sites: Sites) -> None:
        before = bytes_in_use(desk.db)
        body = encode(update_tensors(desk.plan, {}, 1))
        refused(InvalidInput, "invalid-report", part(desk, sites[0], body, 0).finish)
        assert bytes_in_use(desk.db) == before

    def test_with_another_digest_than_claimed_is_dropped(self, desk: Desk, sites: Sites) -> None:
        before = bytes_in_use(desk.db)
        body = desk.body(1)
        request = UploadPart(desk.ctx, sites[0], desk.round.id, 0, len(body), digest(b"other"))
        request.feed(body)
        refused(InvalidInput, "digest-mismatch", request.finish)
        assert bytes_in_use(desk.db) == before

    def test_of_another_body_starts_again(self, desk: Desk, sites: Sites) -> None:
        """The agent has trained anew: what is stored of its older update is of no use."""
        old, new = desk.body(1), desk.body(2)
        torn = part(desk, sites[0], old, 0, 5000)
        with pytest.raises(OffsetMismatch) as caught:
            part(desk, sites[0], new, 5000)
        assert caught.value.offset_bytes == 0
        receipt = part(desk, sites[0], new, 0).finish()
        assert isinstance(receipt, UpdateReceipt)
        assert receipt.digest == digest(new)
        refused(Conflict, "upload-replaced", lambda: torn.feed(old[5000:]))
        assert unreferenced_blobs(desk.db) == set()

    def test_and_a_whole_one_replace_each_other(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        parts = part(desk, sites[0], body, 0, 5000)
        put_ = Upload(desk.ctx, sites[0], desk.round.id, None, len(body))
        refused(Conflict, "upload-replaced", lambda: parts.feed(body[5000:]))
        assert status(desk.ctx, sites[0], desk.round.id) == UploadStatus(0, None, complete=False)
        parts = part(desk, sites[0], body, 0, 5000)
        refused(Conflict, "upload-replaced", lambda: put_.feed(body))
        parts.feed(body[5000:])
        assert isinstance(parts.finish(), UpdateReceipt)

    def test_again_after_acceptance(self, desk: Desk, sites: Sites) -> None:
        body, other = desk.body(1), desk.body(2)
        receipt = desk.put(sites[0], body)
        assert part(desk, sites[0], body, 0).finish() == receipt
        assert part(desk, sites[0], body, 5000).finish() == receipt
        refused(Conflict, "already-uploaded", part(desk, sites[0], other, 0).finish)
        assert count(desk.db, Transfer, Update) == [0, 1]

    def test_larger_than_any_valid_one_is_refused_at_once(self, desk: Desk, sites: Sites) -> None:
        round_id, length = desk.round.id, update_limit(desk.plan) + 1
        refused(TooLarge, "too-large", lambda: UploadPart(desk.ctx, sites[0], round_id, 0, length, "0" * 64))

    def test_that_comes_late_is_told_so(self, desk: Desk, sites: Sites) -> None:
        body, round_id = desk.body(2), desk.round.id
        late = part(desk, sites[1], body, 0, 5000)
        desk.upload(sites[0], 1)
        desk.let_pass(60)
        refused(Gone, "round-closed", lambda: status(desk.ctx, sites[1], round_id))
        refused(Gone, "round-closed", lambda: UploadPart(desk.ctx, sites[1], round_id, 5000, len(body), digest(body)))
        late.feed(body[5000:])
        refused(Gone, "round-closed", late.finish)
        Cleaner(desk.ctx, KEEP).clean()
        assert count(desk.db, Transfer) == [0]
        assert unreferenced_blobs(desk.db) == set()

    def test_cut_off_by_the_end_of_its_round_is_told_so(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(2)
        late = part(desk, sites[1], body, 0, 5000)
        finished = part(desk, sites[1], body, 5000)
        desk.upload(sites[0], 1)
        desk.let_pass(60)
        Cleaner(desk.ctx, KEEP).clean()
        error = refused(Conflict, "upload-replaced", lambda: late.feed(body[5000:]))
        assert "the end of the round" in error.message
        refused(Gone, "round-closed", finished.finish)

    def test_expires_when_its_rest_does_not_come(self, desk: Desk, sites: Sites) -> None:
        before = bytes_in_use(desk.db)
        federations.pause(desk.ctx, OPERATOR, desk.name)  # the round stays open
        body = desk.body(1)
        part(desk, sites[0], body, 0, 5000)
        desk.wait(KEEP.resumable_s / 2)
        part(desk, sites[0], body, 5000, 6000)  # new bytes begin a new day
        desk.wait(KEEP.resumable_s)
        Cleaner(desk.ctx, KEEP).clean()
        assert status(desk.ctx, sites[0], desk.round.id).offset_bytes == 6000
        desk.wait(1)
        assert Cleaner(desk.ctx, KEEP).clean() == 1
        assert bytes_in_use(desk.db) == before
        with pytest.raises(OffsetMismatch) as caught:
            part(desk, sites[0], body, 6000)
        assert caught.value.offset_bytes == 0


class TestWhoMayUpload:
    @pytest.mark.usefixtures("sites")
    def test_a_client_that_was_not_chosen_may_not(self, desk: Desk) -> None:
        late, body = desk.join("late"), desk.body(3)
        refused(NotAllowed, "not-a-participant", lambda: desk.put(late, body))
        refused(NotAllowed, "not-a-participant", lambda: part(desk, late, body, 0))
        refused(NotAllowed, "not-a-participant", lambda: status(desk.ctx, late, desk.round.id))

    @pytest.mark.usefixtures("sites")
    def test_a_client_of_another_federation_does_not_even_see_the_round(self, desk: Desk) -> None:
        other = Desk(desk.db, fedavg_plan("birds"), desk.clock)
        stranger, body = other.join("north"), desk.body(1)
        for round_id in (desk.round.id, 10**6):
            refused(NotFound, "no-such-round", lambda: put(desk.ctx, stranger, round_id, body))  # noqa: B023
            refused(NotFound, "no-such-round", lambda: status(desk.ctx, stranger, round_id))  # noqa: B023
        assert count(desk.db, Transfer) == [0]

    def test_a_rotated_token_replaces_the_old_one(self, desk: Desk) -> None:
        old = desk.join_token("north")
        identity = enrolment.authenticate(desk.ctx, old)
        new = enrolment.rotate(desk.ctx, OPERATOR, desk.name, "north").token
        refused(NotAuthenticated, "invalid-token", lambda: enrolment.authenticate(desk.ctx, old))
        assert enrolment.authenticate(desk.ctx, new) == identity

    def test_a_revoked_client_is_told_so(self, desk: Desk) -> None:
        token = desk.join_token("north")
        enrolment.revoke(desk.ctx, OPERATOR, desk.name, "north")
        refused(NotAllowed, "client-revoked", lambda: enrolment.authenticate(desk.ctx, token))
        refused(Conflict, "client-not-active", lambda: enrolment.rotate(desk.ctx, OPERATOR, desk.name, "north"))
        enrolment.revoke(desk.ctx, OPERATOR, desk.name, "north")  # twice is once

    def test_a_client_that_left_is_told_so(self, desk: Desk) -> None:
        token = desk.join_token("north")
        identity = enrolment.authenticate(desk.ctx, token)
        enrolment.leave(desk.ctx, identity, OPERATOR)
        refused(NotAllowed, "client-left", lambda: enrolment.authenticate(desk.ctx, token))
        again = enrolment.authenticate(desk.ctx, desk.join_token("north"))
        assert again.client_id != identity.client_id
        assert enrolment.authenticate(desk.ctx, enrolment.rotate(desk.ctx, OPERATOR, desk.name, "north").token) == again

    def test_an_unknown_client_cannot_be_revoked(self, desk: Desk) -> None:
        refused(NotFound, "no-such-client", lambda: enrolment.revoke(desk.ctx, OPERATOR, desk.name, "nobody"))

    @pytest.mark.parametrize("text", ["", "dtc", "dtc_", "dtc__", "dtc_0_x", "dti_0_x", "\0", "dtc_" + "a" * 99 + "_x"])
    def test_nonsense_is_no_token(self, desk: Desk, text: str) -> None:
        refused(NotAuthenticated, "invalid-token", lambda: enrolment.authenticate(desk.ctx, text))

    def test_another_clients_secret_is_no_token(self, desk: Desk) -> None:
        north, south = desk.join_token("north"), desk.join_token("south")
        mixed = "_".join([*north.split("_", 2)[:2], south.split("_", 2)[2]])
        refused(NotAuthenticated, "invalid-token", lambda: enrolment.authenticate(desk.ctx, mixed))

    def test_an_upload_under_way_ends_with_its_token(self, desk: Desk, sites: Sites) -> None:
        upload = whole(desk, sites[0], desk.body(1))
        enrolment.rotate(desk.ctx, OPERATOR, desk.name, "north")
        refused(NotAuthenticated, "invalid-token", upload.finish)
        upload.abandon()
        assert count(desk.db, Update, Transfer) == [0, 0]

    @pytest.mark.parametrize("end", ["revoked", "left"])
    def test_an_upload_under_way_ends_with_the_clients_access(self, clean_db: Database, end: str) -> None:
        """A token is checked when a request begins; its bytes may take hours."""
        desk = Desk(clean_db, fedavg_plan(min_clients=3))
        sites = [desk.join("north"), desk.join("south"), desk.join("west")]
        bodies = [desk.body(1), desk.body(2)]
        put_, parts = whole(desk, sites[0], bodies[0]), part(desk, sites[1], bodies[1], 0)
        for who in sites[:2]:
            if end == "revoked":
                enrolment.revoke(desk.ctx, OPERATOR, desk.name, who.name)
            else:
                enrolment.leave(desk.ctx, who, OPERATOR)
        refused(NotAllowed, f"client-{end}", put_.finish)
        refused(NotAllowed, f"client-{end}", parts.finish)
        put_.abandon()
        assert (desk.round.state, desk.round.updates) == ("open", 0)
        assert desk.round.waiting_for == "waiting for 1 of 1 clients: west; deadline in 60 s"

    def test_an_update_outlives_its_client(self, desk: Desk, sites: Sites) -> None:
        bodies = [desk.body(1), desk.body(2)]
        desk.put(sites[0], bodies[0])
        enrolment.revoke(desk.ctx, OPERATOR, desk.name, "north")
        desk.put(sites[1], bodies[1])
        desk.aggregate()
        assert desk.bits(1) == mean_bits(bodies)


class TestInvite:
    REQUEST = JoinRequest(name="north", class_counts={"cat": 1})

    def test_works_once(self, desk: Desk) -> None:
        token = enrolment.invite(desk.ctx, OPERATOR, desk.name, 60).token
        assert enrolment.preview(desk.ctx, token).plan == desk.plan
        enrolment.join(desk.ctx, token, self.REQUEST)
        refused(NotAllowed, "invite-used", lambda: enrolment.join(desk.ctx, token, self.REQUEST))
        refused(NotAllowed, "invite-used", lambda: enrolment.preview(desk.ctx, token))

    def test_expires(self, desk: Desk) -> None:
        token = enrolment.invite(desk.ctx, OPERATOR, desk.name, 60).token
        desk.wait(60)
        refused(NotAllowed, "invite-expired", lambda: enrolment.join(desk.ctx, token, self.REQUEST))

    def test_is_not_used_up_by_a_join_that_is_refused(self, desk: Desk) -> None:
        desk.join("north")
        token = enrolment.invite(desk.ctx, OPERATOR, desk.name, 60).token
        refused(Conflict, "client-name-taken", lambda: enrolment.join(desk.ctx, token, self.REQUEST))
        unknown = JoinRequest(name="south", class_counts={"fish": 1})
        refused(InvalidInput, "unknown-class", lambda: enrolment.join(desk.ctx, token, unknown))
        empty = JoinRequest(name="south", class_counts={"cat": 0})
        refused(InvalidInput, "no-data", lambda: enrolment.join(desk.ctx, token, empty))
        enrolment.join(desk.ctx, token, JoinRequest(name="south", class_counts={"cat": 1}))

    def test_of_an_ended_federation_is_refused(self, desk: Desk) -> None:
        token = enrolment.invite(desk.ctx, OPERATOR, desk.name, 60).token
        federations.cancel(desk.ctx, OPERATOR, desk.name)
        refused(Conflict, "federation-ended", lambda: enrolment.join(desk.ctx, token, self.REQUEST))
        refused(Conflict, "federation-ended", lambda: enrolment.invite(desk.ctx, OPERATOR, desk.name, 60))


def at_once(*steps: Callable[[], object]) -> list[object]:
    """Run the steps in threads that start together; their results, an error being one too."""
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
        """The same body many times at once: one is accepted, the others get its receipt or are told to try again."""
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
