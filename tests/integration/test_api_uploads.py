"""Updates in one PUT: digests, limits, repeats, broken connections."""

import gzip

import pytest
from sqlalchemy import select
from support.api import SocketApi, problem_of
from support.api_calls import count_transfers, large_plan, open_round, open_round_of_two, unique_plan
from support.desk import count, make_overdue
from support.halves import server_half
from support.plans import report, update_body, update_tensors
from support.sockets import RawConnection
from support.waiting import eventually

from server.store.blobs import CHUNK_BYTES
from server.store.tables import Blob, BlobChunk, Transfer, Update
from shared.contract.messages import UpdateReceipt
from shared.tensors.wire import digest, digest_header, encode


class TestPut:
    def test_an_accepted_update_gets_a_receipt(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        body = update_body(north.plan, {}, 1)
        answer = north.put(round_id, body)
        receipt = UpdateReceipt.model_validate(answer.json())
        assert (answer.status_code, receipt.round, receipt.digest, receipt.size_bytes) == (
            200,
            1,
            digest(body),
            len(body),
        )
        view = socket_api.show(north.plan.name)
        assert view.round is not None
        assert (view.round.updates, view.round.opened_at <= receipt.received_at) == (1, True)
        assert count_transfers(socket_api, round_id) == 0

    def test_the_digest_is_optional(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        body = update_body(north.plan, {}, 1)
        answer = north.http.put(f"/v1/rounds/{round_id}/update", content=body, headers=north.headers)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(body))

    def test_a_chunked_body_is_accepted(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        body = update_body(north.plan, {}, 1)
        pieces = (body[begin : begin + 777] for begin in range(0, len(body), 777))
        answer = north.http.put(f"/v1/rounds/{round_id}/update", content=pieces, headers=north.headers)
        assert "content-length" not in answer.request.headers
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(body))

    def test_an_update_of_several_stored_chunks_is_accepted(self, socket_api: SocketApi) -> None:
        plan = large_plan(count=1)
        round_id, (site,) = open_round(socket_api, plan, "north")
        body = update_body(plan, {}, 1)
        assert site.put(round_id, body).status_code == 200
        site.wait_for_model(1)
        model = site.tensors(f"/v1/federations/{plan.name}/model")
        uploaded = {name.removeprefix("shared."): value for name, value in update_tensors(plan, {}, 1).items()}
        assert digest(encode(model)) == digest(
            encode({name.removeprefix("shared/"): v for name, v in uploaded.items()})
        )

    def test_a_repeated_update_gets_the_same_receipt(self, socket_api: SocketApi) -> None:
        """Even after the round is over: the first response may have been lost."""
        round_id, north, south = open_round_of_two(socket_api)
        body = update_body(north.plan, {}, 1)
        first = north.put(round_id, body)
        assert north.put(round_id, body).json() == first.json()
        assert south.put(round_id, update_body(north.plan, {}, 2)).status_code == 200
        north.wait_for_model(1)
        again = north.put(round_id, body)
        assert (again.status_code, again.json()) == (200, first.json())
        rounds = socket_api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")
        assert [len(view["uploads"]) for view in rounds] == [2, 0]

    def test_a_second_update_is_refused(self, socket_api: SocketApi) -> None:
        round_id, north, south = open_round_of_two(socket_api)
        first = north.put(round_id, update_body(north.plan, {}, 1))
        for _ in range(2):
            other = north.put(round_id, update_body(north.plan, {}, 2))
            assert problem_of(other) == (409, "already-uploaded")
        (upload,) = socket_api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")[0]["uploads"]
        assert upload["digest"] == first.json()["digest"]
        assert (
            south.put(round_id, update_body(north.plan, {}, 1)).status_code == 200
        )  # the same bytes, from another site

    def test_a_wrong_digest_is_refused(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        body = update_body(north.plan, {}, 1)
        wrong = north.put(round_id, body, **{"Content-Digest": digest_header(digest(b"something else"))})
        assert problem_of(wrong) == (422, "digest-mismatch")
        assert count_transfers(socket_api, round_id) == 0
        for unusable in ("md5=:AAAA:", "sha-256=AAAA", "nonsense", ""):
            assert problem_of(north.put(round_id, body, **{"Content-Digest": unusable})) == (
                422,
                "unusable-digest",
            )
        both = f"md5=:AAAA:, {digest_header(digest(body))}"
        assert north.put(round_id, body, **{"Content-Digest": both}).status_code == 200

    def test_an_invalid_update_is_refused_and_leaves_nothing(self, socket_api: SocketApi) -> None:
        """A valid one is accepted afterwards."""
        round_id, north, _ = open_round_of_two(socket_api)
        body = update_body(north.plan, {}, 1)
        tensors = update_tensors(north.plan, {}, 1)
        before = count(socket_api.app.state.ctx.db, Blob, BlobChunk, Transfer)
        for wrong, code in (
            (b"", "invalid-tensors"),
            (b"not tensors at all", "invalid-tensors"),
            (body[:-1], "invalid-tensors"),
            (body + b"x", "invalid-tensors"),
            (
                update_body(unique_plan(method={"name": "fedavg"}, image={"height": 20, "width": 20}), {}),
                "invalid-tensors",
            ),
            (encode(tensors), "invalid-report"),
            (encode(tensors, {"report": "{}"}), "invalid-report"),
            (encode(tensors, {"report": report().model_dump_json().replace("10", "0")}), "invalid-report"),
            (encode({name: value * float("nan") for name, value in tensors.items()}), "invalid-tensors"),
        ):
            answer = north.put(round_id, wrong)
            assert problem_of(answer) == (422, code)
        assert count(socket_api.app.state.ctx.db, Blob, BlobChunk, Transfer) == before
        assert north.put(round_id, body).status_code == 200

    @pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
    def test_a_compressed_update_is_refused(self, socket_api: SocketApi, encoding: str) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        answer = north.put(round_id, gzip.compress(update_body(north.plan, {}, 1)), **{"Content-Encoding": encoding})
        assert problem_of(answer) == (415, "encoded-body")
        assert answer.headers["Accept-Encoding"] == "identity"
        assert count_transfers(socket_api, round_id) == 0
        assert (
            north.put(round_id, update_body(north.plan, {}, 1), **{"Content-Encoding": "Identity"}).status_code == 200
        )

    def test_update_after_the_round_is_refused_as_closed(self, socket_api: SocketApi) -> None:
        """The deadline passed with enough updates, so the round ended without this one."""
        plan = unique_plan(method={"name": "fedavg"}, rounds={"min_clients": 2, "quorum": 0.5, "count": 1})
        round_id, (north, south) = open_round(socket_api, plan, "north", "south")
        assert north.put(round_id, update_body(plan, {}, 1)).status_code == 200
        make_overdue(socket_api.app.state.ctx.db)
        south.wait_for_model(1)
        late = south.put(round_id, update_body(plan, {}, 2))
        assert problem_of(late) == (410, "round-closed")
        assert "it is done. The federation is finished." in late.json()["detail"]
        part = south.patch(round_id, b"x", 0, b"xy")
        assert problem_of(part) == (410, "round-closed")
        assert south.http.head(f"/v1/rounds/{round_id}/update", headers=south.headers).status_code == 410

    def test_an_update_to_a_cancelled_federation_is_refused(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        socket_api.admin("POST", f"/v1/federations/{north.plan.name}/cancel")
        late = north.put(round_id, update_body(north.plan, {}, 1))
        assert problem_of(late) == (410, "round-closed")
        assert "it failed: cancelled by the operator" in late.json()["detail"]

    def test_update_is_accepted_while_paused(self, socket_api: SocketApi) -> None:
        """Work already started is not lost: the open round still accepts uploads."""
        round_id, north, _ = open_round_of_two(socket_api)
        socket_api.admin("POST", f"/v1/federations/{north.plan.name}/pause")
        assert north.put(round_id, update_body(north.plan, {}, 1)).status_code == 200

    @pytest.mark.parametrize("expect", [{}, {"Expect": "100-continue"}])
    def test_a_length_over_the_limit_is_refused_before_the_body(
        self, socket_api: SocketApi, expect: dict[str, str]
    ) -> None:
        """Only the headers are ever sent."""
        round_id, north, _ = open_round_of_two(socket_api)
        task = north.task()
        assert task.round is not None
        with RawConnection(socket_api.url) as connection:
            length = task.round.max_update_bytes + 1
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **north.headers, Content_Length=length, **expect)
            status, body = connection.answer()
        assert (status, b'"code":"too-large"' in body) == (413, True)
        assert str(task.round.max_update_bytes).encode() in body
        assert count_transfers(socket_api, round_id) == 0

    def test_a_chunked_body_over_the_limit_is_refused(self, socket_api: SocketApi) -> None:
        round_id, north, _ = open_round_of_two(socket_api)
        limit = server_half(north.plan).update_spec({}).max_total_bytes
        with RawConnection(socket_api.url) as connection:
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **north.headers, Transfer_Encoding="chunked")
            for _ in range(limit // 10_000 + 1):
                connection.send_chunk(b"x" * 10_000)
            connection.send_chunk(b"")
            status, body = connection.answer()
        assert (status, b'"code":"too-large"' in body) == (413, True)
        eventually(lambda: count_transfers(socket_api, round_id) == 0)

    def test_broken_connection_leaves_nothing(self, socket_api: SocketApi) -> None:
        """However much of the body has been stored by then."""
        plan = large_plan()
        round_id, (site,) = open_round(socket_api, plan, "north")
        body = update_body(plan, {}, 1)
        before = count(socket_api.app.state.ctx.db, Blob, BlobChunk, Transfer, Update)
        with RawConnection(socket_api.url) as connection:
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **site.headers, Content_Length=len(body))
            connection.send(body[: CHUNK_BYTES + 1000])
            eventually(lambda: count(socket_api.app.state.ctx.db, BlobChunk)[0] > before[1])
        eventually(lambda: count_transfers(socket_api, round_id) == 0)
        assert count(socket_api.app.state.ctx.db, Blob, BlobChunk, Transfer, Update) == before
        assert site.put(round_id, body).status_code == 200

    def test_chunks_fill_their_rows(self, socket_api: SocketApi) -> None:
        plan = large_plan()
        round_id, (site,) = open_round(socket_api, plan, "north")
        body = update_body(plan, {}, 77)
        receipt = site.put(round_id, body).json()
        with socket_api.app.state.ctx.db.read() as session:
            query = select(BlobChunk.size_bytes).join(Update, Update.blob_id == BlobChunk.blob_id)
            query = query.where(Update.digest == receipt["digest"]).order_by(BlobChunk.start)
            sizes = list(session.execute(query).scalars())
        assert len(sizes) > 1
        assert sizes == [CHUNK_BYTES] * (len(sizes) - 1) + [len(body) - CHUNK_BYTES * (len(sizes) - 1)]

    def test_a_new_upload_replaces_one_in_progress(self, socket_api: SocketApi) -> None:
        """A site whose connection broke unnoticed does not have to wait for the coordinator to notice."""
        round_id, north, _ = open_round_of_two(socket_api)
        body = update_body(north.plan, {}, 1)
        with RawConnection(socket_api.url) as connection:
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **north.headers, Content_Length=len(body))
            connection.send(body[:1000])
            eventually(lambda: count_transfers(socket_api, round_id) == 1)
            assert north.put(round_id, body).status_code == 200
            connection.send(body[1000:])
            status, answer = connection.answer()
        assert (status, b'"code":"upload-replaced"' in answer) == (409, True)
        (upload,) = socket_api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")[0]["uploads"]
        assert upload["digest"] == digest(body)
