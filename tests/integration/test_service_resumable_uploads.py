"""Uploads in parts against real databases: accepted exactly once, or refused without a trace."""

import pytest
import torch
from sqlalchemy import select
from support.desk import (
    OPERATOR,
    Desk,
    count,
    mean_bits,
    refused,
    unreferenced_blobs,
    update_limit,
)
from support.plans import report, update_tensors
from support.uploads import Sites, bytes_in_use, part

from server.core.errors import (
    Conflict,
    Gone,
    InvalidInput,
    TooLarge,
)
from server.service import federations
from server.service.cleaning import Cleaner
from server.service.context import Context
from server.service.retention import Retention
from server.service.uploads.resumable import OffsetMismatch, UploadPart, UploadStatus, status
from server.service.uploads.single_request import SingleRequestUpload
from server.store import blobs
from server.store.database import Database
from server.store.tables import Transfer, Update
from shared.contract.messages import UpdateReceipt
from shared.tensors.wire import digest, encode

KEEP = Retention()


class TestResumableUpload:
    def test_continues_where_the_stored_bytes_end(self, desk: Desk, sites: Sites) -> None:
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
        """Another process, with only the database, accepts the rest."""
        body, round_id = desk.body(1), desk.round.id
        part(desk, sites[0], body, 0, 7777)  # interrupted: no finish
        reopened = Database(desk.db.url.render_as_string(hide_password=False))
        ctx = Context(reopened, desk.clock)
        assert status(ctx, sites[0], round_id) == UploadStatus(7777, len(body), complete=False)
        rest = UploadPart(ctx, sites[0], round_id, 7777, len(body), digest(body))
        rest.feed(body[7777:])
        assert isinstance(rest.finish(), UpdateReceipt)
        reopened.close()

    def test_whose_last_byte_came_before_a_crash_needs_no_more_bytes(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        part(desk, sites[0], body, 0)  # all bytes are stored, but the process died before validating them
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
        """An agent that timed out during validation asks again with an empty part."""
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
        """The agent has trained again: the stored part of its older update is useless."""
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

    def test_and_a_put_replace_each_other(self, desk: Desk, sites: Sites) -> None:
        body = desk.body(1)
        parts = part(desk, sites[0], body, 0, 5000)
        put_ = SingleRequestUpload(desk.ctx, sites[0], desk.round.id, None, len(body))
        refused(Conflict, "upload-replaced", lambda: parts.feed(body[5000:]))
        assert status(desk.ctx, sites[0], desk.round.id) == UploadStatus(0, None, complete=False)
        parts = part(desk, sites[0], body, 0, 5000)
        refused(Conflict, "upload-replaced", lambda: put_.feed(body))
        parts.feed(body[5000:])
        assert isinstance(parts.finish(), UpdateReceipt)

    def test_repeated_after_acceptance_gets_the_same_receipt(self, desk: Desk, sites: Sites) -> None:
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

    def test_expires_when_no_more_bytes_come(self, desk: Desk, sites: Sites) -> None:
        before = bytes_in_use(desk.db)
        federations.pause(desk.ctx, OPERATOR, desk.name)  # the round stays open
        body = desk.body(1)
        part(desk, sites[0], body, 0, 5000)
        desk.wait(KEEP.resumable_s / 2)
        part(desk, sites[0], body, 5000, 6000)  # new bytes restart the expiry
        desk.wait(KEEP.resumable_s)
        Cleaner(desk.ctx, KEEP).clean()
        assert status(desk.ctx, sites[0], desk.round.id).offset_bytes == 6000
        desk.wait(1)
        assert Cleaner(desk.ctx, KEEP).clean() == 1
        assert bytes_in_use(desk.db) == before
        with pytest.raises(OffsetMismatch) as caught:
            part(desk, sites[0], body, 6000)
        assert caught.value.offset_bytes == 0
