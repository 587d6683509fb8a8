"""Updates in several PATCH requests: offsets, repeats, broken connections, restarts of the coordinator."""

import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from support.api import SocketApi, problem_of
from support.api_calls import count_transfers, large_plan, open_round, open_round_of_two
from support.coordinator import Site, running
from support.halves import server_half
from support.plans import update_body
from support.sockets import RawConnection
from support.waiting import eventually

from server.api import uploads
from server.store.blobs import CHUNK_BYTES
from server.store.tables import Blob, Transfer
from shared.contract.messages import UpdateReceipt
from shared.tensors.wire import digest, digest_header


def progress(site: Site, round_id: int) -> tuple[str | None, ...]:
    """Return the offset, length and completeness of a resumable upload, from HEAD."""
    answer = site.http.head(f"/v1/rounds/{round_id}/update", headers=site.headers)
    assert answer.status_code == 200
    return tuple(answer.headers.get(name) for name in ("Upload-Offset", "Upload-Length", "Upload-Complete"))


def arrived(api: SocketApi, round_id: int) -> tuple[int, bool]:
    """Return how much of the round's only upload is stored, and whether it counts as arriving."""
    with api.app.state.ctx.db.read() as session:
        query = select(Blob.size_bytes, Transfer.grown_uptime).join(Transfer, Transfer.blob_id == Blob.id)
        row = session.execute(query.where(Transfer.round_id == round_id)).one_or_none()
        return (0, False) if row is None else (row.size_bytes, row.grown_uptime is not None)


def send_part(
    api: Any, site: Site, round_id: int, whole: bytes, begin: int, end: int, method: str = "PATCH"
) -> RawConnection:
    """Announce everything from `begin` on, but send only the bytes before `end`."""
    connection = RawConnection(api.url)
    connection.send_head(
        method,
        f"/v1/rounds/{round_id}/update",
        **site.headers,
        Content_Length=len(whole) - begin,
        Upload_Offset=begin,
        Upload_Length=len(whole),
        Repr_Digest=digest_header(digest(whole)),
    )
    connection.send(whole[begin:end])
    return connection


class TestPatch:
    def test_an_update_can_be_sent_part_by_part(self, socket_api: SocketApi) -> None:
        round_id, north, south = open_round_of_two(socket_api)
        whole = update_body(north.plan, {}, 1)
        length = str(len(whole))
        assert progress(north, round_id) == ("0", None, "?0")
        for begin, end in ((0, 1), (1, 5000), (5000, 5000), (5000, len(whole) - 1)):
            answer = north.patch(round_id, whole[begin:end], begin, whole)
            assert (answer.status_code, answer.headers["Upload-Offset"]) == (204, str(end))
            assert progress(north, round_id) == (str(end), length, "?0")
        last = north.patch(round_id, whole[-1:], len(whole) - 1, whole)
        receipt = UpdateReceipt.model_validate(last.json())
        assert (last.status_code, receipt.digest, receipt.size_bytes) == (200, digest(whole), len(whole))
        assert (last.headers["Upload-Offset"], last.headers["Upload-Complete"]) == (length, "?1")
        assert progress(north, round_id) == (length, length, "?1")
        assert progress(south, round_id) == ("0", None, "?0")

    def test_repeated_parts_count_once_and_get_the_same_receipt(self, socket_api: SocketApi) -> None:
        """Repeats of the last part, of the whole, and as a PUT."""
        round_id, north, south = open_round_of_two(socket_api)
        whole, other = (update_body(north.plan, {}, seed) for seed in (1, 2))
        assert north.patch(round_id, whole[:9000], 0, whole).status_code == 204
        receipt = north.patch(round_id, whole[9000:], 9000, whole)
        assert receipt.status_code == 200
        repeats = [north.patch(round_id, whole[9000:], 9000, whole), north.patch(round_id, whole, 0, whole)]
        repeats.append(north.put(round_id, whole))
        assert [(answer.status_code, answer.json()) for answer in repeats] == [(200, receipt.json())] * 3
        assert problem_of(north.patch(round_id, other, 0, other)) == (409, "already-uploaded")
        assert south.put(round_id, other).status_code == 200
        south.wait_for_model(1)
        view = socket_api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")[0]
        assert [upload["digest"] for upload in view["uploads"]] == [digest(whole), digest(other)]

    def test_a_wrong_offset_is_refused_with_the_right_one(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        whole = update_body(north.plan, {}, 1)
        early = north.patch(round_id, whole[100:], 100, whole)
        assert (problem_of(early), early.headers["Upload-Offset"]) == ((409, "offset-mismatch"), "0")
        assert north.patch(round_id, whole[:1000], 0, whole).status_code == 204
        for offset in (0, 999, 1001, len(whole)):
            answer = north.patch(round_id, whole[offset : offset + 10], offset, whole)
            assert (problem_of(answer), answer.headers["Upload-Offset"]) == ((409, "offset-mismatch"), "1000")
        assert progress(north, round_id)[0] == "1000"
        assert north.patch(round_id, whole[1000:], 1000, whole).status_code == 200

    def test_another_upload_starts_from_byte_0(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        first, second = (update_body(north.plan, {}, seed) for seed in (1, 2))
        assert north.patch(round_id, first[:1000], 0, first).status_code == 204
        middle = north.patch(round_id, second[1000:], 1000, second)
        assert (problem_of(middle), middle.headers["Upload-Offset"]) == ((409, "offset-mismatch"), "0")
        assert progress(north, round_id)[0] == "1000"
        assert north.patch(round_id, second[:500], 0, second).status_code == 204
        assert progress(north, round_id)[0] == "500"
        assert north.put(round_id, first).status_code == 200  # a PUT ends a resumable upload
        assert progress(north, round_id)[2] == "?1"
        assert count_transfers(socket_api, round_id) == 0

    def test_more_bytes_than_announced_are_refused(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        whole = update_body(north.plan, {}, 1)
        assert north.patch(round_id, whole[:1000], 0, whole).status_code == 204
        answer = north.patch(round_id, whole[1000:] + b"x", 1000, whole)
        assert problem_of(answer) == (422, "too-many-bytes")
        assert progress(north, round_id)[0] == "1000"
        assert north.patch(round_id, whole[1000:], 1000, whole).status_code == 200

    def test_a_length_over_the_limit_is_refused(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        limit = server_half(north.plan).update_spec({}).max_total_bytes
        answer = north.patch(round_id, b"x", 0, b"x" * (limit + 1))
        assert problem_of(answer) == (413, "too-large")
        assert count_transfers(socket_api, round_id) == 0

    def test_missing_or_invalid_headers_are_refused(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        url = f"/v1/rounds/{round_id}/update"
        answer = north.http.patch(url, content=b"x", headers=north.headers)
        assert problem_of(answer) == (422, "invalid-request")
        fields = [fault.partition(":")[0] for fault in answer.json()["errors"]]
        assert fields == ["header.upload-offset"]
        right = {"Upload-Offset": "0", "Upload-Length": "9", "Repr-Digest": digest_header(digest(b""))}
        for name, value, code in (
            ("Upload-Offset", "-1", "invalid-request"),
            ("Upload-Offset", str(2**63), "invalid-request"),
            ("Upload-Offset", "first", "invalid-request"),
            ("Upload-Length", "0", "invalid-request"),
            ("Repr-Digest", "md5=:AAAA:", "unusable-digest"),
        ):
            answer = north.http.patch(url, content=b"x", headers=north.headers | right | {name: value})
            assert problem_of(answer) == (422, code)
        answer = north.http.patch(url, content=b"x", headers=north.headers | right | {"Content-Encoding": "gzip"})
        assert problem_of(answer) == (415, "encoded-body")
        assert count_transfers(socket_api, round_id) == 0

    def test_an_invalid_whole_is_dropped(self, socket_api: SocketApi) -> None:
        """Resuming cannot fix it, so the next attempt starts at byte 0."""
        round_id, north, _ = open_round_of_two(socket_api)
        right = update_body(north.plan, {}, 1)
        damaged = right[:-4] + b"\0\0\0\0"
        assert north.patch(round_id, damaged[:1000], 0, right).status_code == 204
        assert problem_of(north.patch(round_id, damaged[1000:], 1000, right)) == (422, "digest-mismatch")
        assert progress(north, round_id) == ("0", None, "?0")
        nonsense = b"not tensors at all"
        assert problem_of(north.patch(round_id, nonsense, 0, nonsense)) == (422, "invalid-tensors")
        assert progress(north, round_id) == ("0", None, "?0")
        assert north.patch(round_id, right, 0, right).status_code == 200

    def test_broken_connection_keeps_what_was_received(
        self, socket_api: SocketApi, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Including what had been read but not yet stored."""
        caplog.set_level(logging.INFO)
        plan = large_plan()
        round_id, (site,) = open_round(socket_api, plan, "north")
        whole = update_body(plan, {}, 1)
        sent = CHUNK_BYTES + 1_000_000
        with send_part(socket_api, site, round_id, whole, 0, sent):
            eventually(lambda: progress(site, round_id)[0] != "0")
        eventually(lambda: f"PATCH /v1/rounds/{round_id}/update 408" in caplog.messages)
        kept = int(str(progress(site, round_id)[0]))
        assert CHUNK_BYTES <= kept <= sent
        answer = site.patch(round_id, whole[kept:], kept, whole)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(whole))

    @pytest.mark.parametrize("method", ["PUT", "PATCH"])
    def test_slow_bytes_are_stored_as_they_arrive(
        self, socket_api: SocketApi, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        """Not only when a chunk is full: the round must see that bytes keep coming."""
        monkeypatch.setattr(uploads, "FLUSH_S", 0)
        round_id, north, _ = open_round_of_two(socket_api)
        whole = update_body(north.plan, {}, 1)
        with send_part(socket_api, north, round_id, whole, 0, 1, method) as connection:
            stored = 0
            for begin in range(1, 10):
                eventually(lambda begin=begin: arrived(socket_api, round_id) == (begin, True))  # type: ignore[misc]
                stored, _ = arrived(socket_api, round_id)
                connection.send(whole[begin : begin + 1])
                eventually(lambda before=stored: arrived(socket_api, round_id)[0] > before)  # type: ignore[misc]
            assert stored == 9
            connection.send(whole[10:])
            status, _ = connection.answer()
        assert status == 200

    def test_concurrent_parts_never_mix(self, socket_api: SocketApi) -> None:
        """A part can arrive while another request is still appending."""
        plan = large_plan()
        round_id, (site,) = open_round(socket_api, plan, "north")
        whole = update_body(plan, {}, 1)
        with send_part(socket_api, site, round_id, whole, 0, CHUNK_BYTES + 10) as connection:
            eventually(lambda: progress(site, round_id)[0] != "0")
            stored = int(str(progress(site, round_id)[0]))
            assert site.patch(round_id, whole[stored : stored + 99], stored, whole).status_code == 204
            connection.send(whole[CHUNK_BYTES + 10 :])
            status, answer = connection.answer()
        assert (status, b'"code":"offset-mismatch"' in answer) == (409, True)
        assert progress(site, round_id)[0] == str(stored + 99)
        assert site.patch(round_id, whole[stored + 99 :], stored + 99, whole).status_code == 200


@pytest.mark.parametrize("empty_db_url", ["sqlite"], indirect=True)
def test_an_upload_can_be_resumed_after_the_coordinator_was_killed(db_url: str, tmp_path: Path) -> None:
    """After kill -9 in the middle of a PATCH, the next process continues at the stored byte."""
    plan = large_plan(count=1)
    whole = update_body(plan, {}, 1)
    with running(db_url, tmp_path, forked=True) as first:
        first.create(plan)
        site = first.join(plan, "north", {"cat": 1})
        task = site.task()
        assert task.round is not None
        round_id = task.round.id
        with send_part(first, site, round_id, whole, 0, CHUNK_BYTES + 1000):
            eventually(lambda: progress(site, round_id)[0] != "0")
            stored = int(str(progress(site, round_id)[0]))
            first.kill()
    with running(db_url, tmp_path, forked=True) as second:
        site = Site(second.http, plan, "north", site.token)
        assert progress(site, round_id) == (str(stored), str(len(whole)), "?0")
        assert stored >= CHUNK_BYTES
        assert site.task(wait_s=0).action == "train"
        answer = site.patch(round_id, whole[stored:], stored, whole)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(whole))
        site.wait_for_model(1)
        (view,) = second.admin("GET", f"/v1/federations/{plan.name}/rounds")
        assert [upload["digest"] for upload in view["uploads"]] == [digest(whole)]
