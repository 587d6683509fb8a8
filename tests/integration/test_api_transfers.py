"""Models down, updates up: caching, ranges, digests, limits, torn connections and resumed uploads."""

import gzip
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from support.api import RawConnection, SocketApi, new_database
from support.coordinator import Site, running
from support.databases import KINDS
from support.plans import report, small_plan, update_body, update_tensors
from support.service import make_overdue
from support.waiting import eventually

from server.api import rounds
from server.store.blobs import CHUNK_BYTES
from server.store.tables import Base, Blob, BlobChunk, Transfer, Update
from shared.methods import server_half
from shared.plan import FederationPlan
from shared.schemas import UpdateReceipt
from shared.wire import digest, digest_header, encode

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module", params=KINDS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    """One coordinator behind a real socket; each test has a federation of its own."""
    with SocketApi(new_database(request.param, request, tmp_path_factory.mktemp("transfers"))) as api:
        yield api


def new_plan(**tables: Any) -> FederationPlan:
    return small_plan(f"pets-{next(NUMBERS)}", method={"name": "fedavg"}, **tables)


def large_plan(**rounds: Any) -> FederationPlan:
    """A model of several chunks."""
    return new_plan(model={"dense_dim": 10_000}, image={"height": 32, "width": 32}, rounds=rounds)


def open_round(api: SocketApi, plan: FederationPlan, *names: str) -> tuple[int, list[Site]]:
    """A federation whose round is open for these sites; the round's id."""
    api.create(plan)
    sites = [api.join(plan, name, {"cat": 1}) for name in names]
    task = sites[-1].task()
    assert task.round is not None
    return task.round.id, sites


def two_sites(api: SocketApi) -> tuple[int, Site, Site]:
    """Two participants, so that the round stays open after one upload."""
    round_id, (north, south) = open_round(api, new_plan(rounds={"min_clients": 2}), "north", "south")
    return round_id, north, south


def problem_of(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["Content-Type"] == "application/problem+json"
    return answer.status_code, answer.json()["code"]


def rows(api: SocketApi, *tables: type[Base]) -> list[int]:
    """How many rows there are, in all federations."""
    with api.app.state.ctx.db.read() as session:
        return [session.execute(select(func.count()).select_from(table)).scalar_one() for table in tables]


def transfers(api: SocketApi, round_id: int) -> int:
    with api.app.state.ctx.db.read() as session:
        query = select(func.count()).select_from(Transfer).where(Transfer.round_id == round_id)
        return int(session.execute(query).scalar_one())


def follow(site: Site, model: int) -> None:
    """Wait until the coordinator has published this model."""
    task = site.task(wait_s=0)
    while task.model is None or task.model.number < model:
        task = site.task(after=task.ticket)


class TestDownloads:
    @pytest.fixture(scope="module")
    @staticmethod
    def model(api: SocketApi) -> tuple[Site, str, bytes]:
        """A site, the address of a model of several chunks, and its bytes."""
        round_id, (site,) = open_round(api, large_plan(), "north")
        url = f"/v1/rounds/{round_id}/model"
        body = site.http.get(url, headers=site.headers).content
        assert len(body) > 2 * CHUNK_BYTES
        return site, url, body

    def test_every_kind_of_tensors(self, api: SocketApi) -> None:
        """The tag is the digest that the task names, or the body's own; HEAD says the same without the body."""
        plan = small_plan(f"pets-{next(NUMBERS)}")
        round_id, (site,) = open_round(api, plan, "north")
        task = site.task()
        assert task.model is not None
        digests = []
        for url in (
            task.model.url,
            f"/v1/rounds/{round_id}/model",
            f"/v1/federations/{plan.name}/model",
            f"/v1/rounds/{round_id}/personal",
            f"/v1/federations/{plan.name}/personal?model=0",
        ):
            answer, head = (site.http.request(method, url, headers=site.headers) for method in ("GET", "HEAD"))
            assert (answer.status_code, head.status_code, head.content) == (200, 200, b"")
            assert answer.headers["Content-Type"] == "application/vnd.safetensors"
            assert answer.headers["Content-Length"] == str(len(answer.content))
            assert answer.headers["ETag"] == f'"{digest(answer.content)}"'
            assert answer.headers["Repr-Digest"] == digest_header(digest(answer.content))
            assert answer.headers["Accept-Ranges"] == "bytes"
            for name in ("Content-Type", "Content-Length", "ETag", "Repr-Digest", "Accept-Ranges", "Cache-Control"):
                assert head.headers[name] == answer.headers[name]
            digests.append(digest(answer.content))
        assert set(digests[:3]) == {task.model.digest}
        assert task.model.digest not in digests[3:]

    def test_what_is_known_is_not_sent_again(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        tag = f'"{digest(body)}"'
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            for method in ("GET", "HEAD"):
                answer = site.http.request(method, url, headers=site.headers | {"If-None-Match": known})
                assert (answer.status_code, answer.content, answer.headers["ETag"]) == (304, b"", tag)
        for other in ('"other"', digest(body), '""'):
            assert site.http.get(url, headers=site.headers | {"If-None-Match": other}).content == body

    @pytest.mark.parametrize(
        ("wanted", "begin", "end"),
        [
            ("bytes=0-0", 0, 1),
            ("bytes=0-99", 0, 100),
            ("bytes=100-", 100, None),
            ("bytes=-1", -1, None),
            ("bytes=-100", -100, None),
            ("bytes=-99999999999", 0, None),
            ("bytes=5-99999999999", 5, None),
            (f"bytes={CHUNK_BYTES - 1}-{CHUNK_BYTES}", CHUNK_BYTES - 1, CHUNK_BYTES + 1),
            (f"bytes={CHUNK_BYTES}-{2 * CHUNK_BYTES - 1}", CHUNK_BYTES, 2 * CHUNK_BYTES),
            (f"bytes=7-{2 * CHUNK_BYTES + 7}", 7, 2 * CHUNK_BYTES + 8),
        ],
    )
    def test_a_part(self, model: tuple[Site, str, bytes], wanted: str, begin: int, end: int | None) -> None:
        site, url, body = model
        answer = site.http.get(url, headers=site.headers | {"Range": wanted})
        assert (answer.status_code, answer.content) == (206, body[begin:end])
        first = range(len(body))[begin]
        assert answer.headers["Content-Range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(body)}"
        assert answer.headers["Content-Length"] == str(len(answer.content))
        assert answer.headers["ETag"] == f'"{digest(body)}"'

    def test_a_part_outside(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        for wanted in (f"bytes={len(body)}-", f"bytes={len(body)}-{len(body) + 5}", "bytes=-0"):
            answer = site.http.get(url, headers=site.headers | {"Range": wanted})
            assert problem_of(answer) == (416, "range-not-satisfiable")
            assert answer.headers["Content-Range"] == f"bytes */{len(body)}"

    @pytest.mark.parametrize(
        "wanted",
        [
            *("bytes=", "bytes=-", "bytes=a-b", "bytes=5-2", "bytes=0-1,5-6", "lines=0-1", "0-1", "bytes=1"),
            f"bytes={'9' * 5000}-",
        ],
    )
    def test_a_range_that_is_not_understood_is_ignored(self, model: tuple[Site, str, bytes], wanted: str) -> None:
        site, url, body = model
        answer = site.http.get(url, headers=site.headers | {"Range": wanted})
        assert (answer.status_code, answer.content) == (200, body)

    def test_a_range_without_a_body_is_ignored(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        head = site.http.head(url, headers=site.headers | {"Range": "bytes=0-9"})
        assert (head.status_code, head.headers["Content-Length"]) == (200, str(len(body)))

    def test_a_part_of_what_has_changed_is_the_whole(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        headers = site.headers | {"Range": "bytes=10-"}
        same = site.http.get(url, headers=headers | {"If-Range": f'"{digest(body)}"'})
        assert (same.status_code, same.content) == (206, body[10:])
        for stale in ('"another"', f'W/"{digest(body)}"', "Mon, 16 Nov 2026 00:00:00 GMT"):
            answer = site.http.get(url, headers=headers | {"If-Range": stale})
            assert (answer.status_code, answer.content) == (200, body)

    def test_a_download_that_broke_off_goes_on(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        with site.http.stream("GET", url, headers=site.headers) as answer:
            first = next(answer.iter_bytes(1_000_000))
            tag = answer.headers["ETag"]
        rest = site.http.get(url, headers=site.headers | {"Range": f"bytes={len(first)}-", "If-Range": tag})
        assert first + rest.content == body

    def test_personal_tensors_of_a_model_that_was_followed_by_another(self, api: SocketApi) -> None:
        plan = small_plan(f"pets-{next(NUMBERS)}")
        round_id, (site,) = open_round(api, plan, "north")
        task = site.task()
        assert site.put(round_id, update_body(plan, task.facts)).status_code == 200
        follow(site, 1)
        for url in (f"/v1/rounds/{round_id}/personal", f"/v1/federations/{plan.name}/personal?model=0"):
            assert problem_of(site.http.get(url, headers=site.headers)) == (410, "model-superseded")
        answer = site.http.get(f"/v1/federations/{plan.name}/personal?model=2", headers=site.headers)
        assert problem_of(answer) == (404, "no-such-model")
        assert site.http.get(f"/v1/rounds/{round_id}/model", headers=site.headers).status_code == 200


class TestPut:
    def test_the_receipt(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        body = update_body(north.plan, {}, 1)
        answer = north.put(round_id, body)
        receipt = UpdateReceipt.model_validate(answer.json())
        assert (answer.status_code, receipt.round, receipt.digest, receipt.size_bytes) == (
            200,
            1,
            digest(body),
            len(body),
        )
        view = api.show(north.plan.name)
        assert view.round is not None
        assert (view.round.updates, view.round.opened_at <= receipt.received_at) == (1, True)
        assert transfers(api, round_id) == 0

    def test_without_a_digest(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        body = update_body(north.plan, {}, 1)
        answer = north.http.put(f"/v1/rounds/{round_id}/update", content=body, headers=north.headers)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(body))

    def test_in_chunks_of_unknown_total(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        body = update_body(north.plan, {}, 1)
        pieces = (body[begin : begin + 777] for begin in range(0, len(body), 777))
        answer = north.http.put(f"/v1/rounds/{round_id}/update", content=pieces, headers=north.headers)
        assert "content-length" not in answer.request.headers
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(body))

    def test_of_several_chunks_in_the_database(self, api: SocketApi) -> None:
        plan = large_plan(count=1)
        round_id, (site,) = open_round(api, plan, "north")
        body = update_body(plan, {}, 1)
        assert site.put(round_id, body).status_code == 200
        follow(site, 1)
        model = site.tensors(f"/v1/federations/{plan.name}/model")
        uploaded = {name.removeprefix("shared."): value for name, value in update_tensors(plan, {}, 1).items()}
        assert digest(encode(model)) == digest(
            encode({name.removeprefix("shared/"): v for name, v in uploaded.items()})
        )

    def test_the_same_again_is_answered_as_the_first_time(self, api: SocketApi) -> None:
        """Also when the round is over: the answer to the first one may have been lost."""
        round_id, north, south = two_sites(api)
        body = update_body(north.plan, {}, 1)
        first = north.put(round_id, body)
        assert north.put(round_id, body).json() == first.json()
        assert south.put(round_id, update_body(north.plan, {}, 2)).status_code == 200
        follow(north, 1)
        again = north.put(round_id, body)
        assert (again.status_code, again.json()) == (200, first.json())
        rounds = api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")
        assert [len(view["uploads"]) for view in rounds] == [2, 0]

    def test_another_one_is_refused(self, api: SocketApi) -> None:
        round_id, north, south = two_sites(api)
        first = north.put(round_id, update_body(north.plan, {}, 1))
        for _ in range(2):
            other = north.put(round_id, update_body(north.plan, {}, 2))
            assert problem_of(other) == (409, "already-uploaded")
        (upload,) = api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")[0]["uploads"]
        assert upload["digest"] == first.json()["digest"]
        assert south.put(round_id, update_body(north.plan, {}, 1)).status_code == 200  # the same bytes of another site

    def test_a_wrong_digest(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        body = update_body(north.plan, {}, 1)
        wrong = north.put(round_id, body, **{"Content-Digest": digest_header(digest(b"something else"))})
        assert problem_of(wrong) == (422, "digest-mismatch")
        assert transfers(api, round_id) == 0
        for unusable in ("md5=:AAAA:", "sha-256=AAAA", "nonsense", ""):
            assert problem_of(north.put(round_id, body, **{"Content-Digest": unusable})) == (422, "unusable-digest")
        both = f"md5=:AAAA:, {digest_header(digest(body))}"
        assert north.put(round_id, body, **{"Content-Digest": both}).status_code == 200

    def test_what_is_not_an_update(self, api: SocketApi) -> None:
        """Nothing of it stays, and a right one is accepted afterwards."""
        round_id, north, _ = two_sites(api)
        body = update_body(north.plan, {}, 1)
        tensors = update_tensors(north.plan, {}, 1)
        before = rows(api, Blob, BlobChunk, Transfer)
        for wrong, code in (
            (b"", "invalid-tensors"),
            (b"not tensors at all", "invalid-tensors"),
            (body[:-1], "invalid-tensors"),
            (body + b"x", "invalid-tensors"),
            (update_body(new_plan(image={"height": 20, "width": 20}), {}), "invalid-tensors"),
            (encode(tensors), "invalid-report"),
            (encode(tensors, {"report": "{}"}), "invalid-report"),
            (encode(tensors, {"report": report().model_dump_json().replace("10", "0")}), "invalid-report"),
            (encode({name: value * float("nan") for name, value in tensors.items()}), "invalid-tensors"),
        ):
            answer = north.put(round_id, wrong)
            assert problem_of(answer) == (422, code)
        assert rows(api, Blob, BlobChunk, Transfer) == before
        assert north.put(round_id, body).status_code == 200

    @pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
    def test_compressed(self, api: SocketApi, encoding: str) -> None:
        round_id, north, _ = two_sites(api)
        answer = north.put(round_id, gzip.compress(update_body(north.plan, {}, 1)), **{"Content-Encoding": encoding})
        assert problem_of(answer) == (415, "encoded-body")
        assert answer.headers["Accept-Encoding"] == "identity"
        assert transfers(api, round_id) == 0
        assert (
            north.put(round_id, update_body(north.plan, {}, 1), **{"Content-Encoding": "Identity"}).status_code == 200
        )

    def test_late(self, api: SocketApi) -> None:
        """The deadline has passed with enough updates: the round is done without it."""
        plan = new_plan(rounds={"min_clients": 2, "quorum": 0.5, "count": 1})
        round_id, (north, south) = open_round(api, plan, "north", "south")
        assert north.put(round_id, update_body(plan, {}, 1)).status_code == 200
        make_overdue(api.app.state.ctx.db)
        follow(south, 1)
        late = south.put(round_id, update_body(plan, {}, 2))
        assert problem_of(late) == (410, "round-closed")
        assert "it is done. The federation is finished." in late.json()["detail"]
        part = south.patch(round_id, b"x", 0, b"xy")
        assert problem_of(part) == (410, "round-closed")
        assert south.http.head(f"/v1/rounds/{round_id}/update", headers=south.headers).status_code == 410

    def test_of_a_cancelled_federation(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        api.admin("POST", f"/v1/federations/{north.plan.name}/cancel")
        late = north.put(round_id, update_body(north.plan, {}, 1))
        assert problem_of(late) == (410, "round-closed")
        assert "it failed: cancelled by the operator" in late.json()["detail"]

    def test_while_paused(self, api: SocketApi) -> None:
        """Work that was begun is not lost: uploads of the open round are still taken."""
        round_id, north, _ = two_sites(api)
        api.admin("POST", f"/v1/federations/{north.plan.name}/pause")
        assert north.put(round_id, update_body(north.plan, {}, 1)).status_code == 200

    @pytest.mark.parametrize("expect", [{}, {"Expect": "100-continue"}])
    def test_a_length_over_the_limit_is_refused_before_the_body(self, api: SocketApi, expect: dict[str, str]) -> None:
        """Only the headers are ever sent."""
        round_id, north, _ = two_sites(api)
        task = north.task()
        assert task.round is not None
        with RawConnection(api.url) as connection:
            length = task.round.max_update_bytes + 1
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **north.headers, Content_Length=length, **expect)
            status, body = connection.answer()
        assert (status, b'"code":"too-large"' in body) == (413, True)
        assert str(task.round.max_update_bytes).encode() in body
        assert transfers(api, round_id) == 0

    def test_chunks_over_the_limit(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        limit = server_half(north.plan).update_spec({}).max_total_bytes
        with RawConnection(api.url) as connection:
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **north.headers, Transfer_Encoding="chunked")
            for _ in range(limit // 10_000 + 1):
                connection.send_chunk(b"x" * 10_000)
            connection.send_chunk(b"")
            status, body = connection.answer()
        assert (status, b'"code":"too-large"' in body) == (413, True)
        eventually(lambda: transfers(api, round_id) == 0)

    def test_torn(self, api: SocketApi) -> None:
        """A connection that breaks in the middle of the body leaves nothing, however much had been stored."""
        plan = large_plan()
        round_id, (site,) = open_round(api, plan, "north")
        body = update_body(plan, {}, 1)
        before = rows(api, Blob, BlobChunk, Transfer, Update)
        with RawConnection(api.url) as connection:
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **site.headers, Content_Length=len(body))
            connection.send(body[: CHUNK_BYTES + 1000])
            eventually(lambda: rows(api, BlobChunk)[0] > before[1])
        eventually(lambda: transfers(api, round_id) == 0)
        assert rows(api, Blob, BlobChunk, Transfer, Update) == before
        assert site.put(round_id, body).status_code == 200

    def test_a_new_one_takes_the_place_of_one_under_way(self, api: SocketApi) -> None:
        """A site whose link broke unnoticed need not wait for the coordinator to notice."""
        round_id, north, _ = two_sites(api)
        body = update_body(north.plan, {}, 1)
        with RawConnection(api.url) as connection:
            path = f"/v1/rounds/{round_id}/update"
            connection.send_head("PUT", path, **north.headers, Content_Length=len(body))
            connection.send(body[:1000])
            eventually(lambda: transfers(api, round_id) == 1)
            assert north.put(round_id, body).status_code == 200
            connection.send(body[1000:])
            status, answer = connection.answer()
        assert (status, b'"code":"upload-replaced"' in answer) == (409, True)
        (upload,) = api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")[0]["uploads"]
        assert upload["digest"] == digest(body)


def progress(site: Site, round_id: int) -> tuple[str | None, ...]:
    """What HEAD tells of a resumable upload: offset, length, complete."""
    answer = site.http.head(f"/v1/rounds/{round_id}/update", headers=site.headers)
    assert answer.status_code == 200
    return tuple(answer.headers.get(name) for name in ("Upload-Offset", "Upload-Length", "Upload-Complete"))


def arrived(api: SocketApi, round_id: int) -> tuple[int, bool]:
    """How much of the round's one upload under way is stored, and whether it counts as arriving."""
    with api.app.state.ctx.db.read() as session:
        query = select(Blob.size_bytes, Transfer.grown_uptime).join(Transfer, Transfer.blob_id == Blob.id)
        row = session.execute(query.where(Transfer.round_id == round_id)).one_or_none()
        return (0, False) if row is None else (row.size_bytes, row.grown_uptime is not None)


def send_part(
    api: Any, site: Site, round_id: int, whole: bytes, begin: int, end: int, method: str = "PATCH"
) -> RawConnection:
    """A request that announces everything from `begin` on and sends only the bytes before `end`."""
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
    def test_part_by_part(self, api: SocketApi) -> None:
        round_id, north, south = two_sites(api)
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

    def test_the_result_is_that_of_a_put_and_counts_once(self, api: SocketApi) -> None:
        """Repeats of the last part, of the whole, and as a PUT are answered with the same receipt."""
        round_id, north, south = two_sites(api)
        whole, other = (update_body(north.plan, {}, seed) for seed in (1, 2))
        assert north.patch(round_id, whole[:9000], 0, whole).status_code == 204
        receipt = north.patch(round_id, whole[9000:], 9000, whole)
        assert receipt.status_code == 200
        repeats = [north.patch(round_id, whole[9000:], 9000, whole), north.patch(round_id, whole, 0, whole)]
        repeats.append(north.put(round_id, whole))
        assert [(answer.status_code, answer.json()) for answer in repeats] == [(200, receipt.json())] * 3
        assert problem_of(north.patch(round_id, other, 0, other)) == (409, "already-uploaded")
        assert south.put(round_id, other).status_code == 200
        follow(south, 1)
        view = api.admin("GET", f"/v1/federations/{north.plan.name}/rounds")[0]
        assert [upload["digest"] for upload in view["uploads"]] == [digest(whole), digest(other)]

    def test_a_wrong_offset(self, api: SocketApi) -> None:
        """The answer names the right one; what is stored stays as it is."""
        round_id, north, _ = two_sites(api)
        whole = update_body(north.plan, {}, 1)
        early = north.patch(round_id, whole[100:], 100, whole)
        assert (problem_of(early), early.headers["Upload-Offset"]) == ((409, "offset-mismatch"), "0")
        assert north.patch(round_id, whole[:1000], 0, whole).status_code == 204
        for offset in (0, 999, 1001, len(whole)):
            answer = north.patch(round_id, whole[offset : offset + 10], offset, whole)
            assert (problem_of(answer), answer.headers["Upload-Offset"]) == ((409, "offset-mismatch"), "1000")
        assert progress(north, round_id)[0] == "1000"
        assert north.patch(round_id, whole[1000:], 1000, whole).status_code == 200

    def test_another_upload_begins_anew(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        first, second = (update_body(north.plan, {}, seed) for seed in (1, 2))
        assert north.patch(round_id, first[:1000], 0, first).status_code == 204
        middle = north.patch(round_id, second[1000:], 1000, second)
        assert (problem_of(middle), middle.headers["Upload-Offset"]) == ((409, "offset-mismatch"), "0")
        assert progress(north, round_id)[0] == "1000"
        assert north.patch(round_id, second[:500], 0, second).status_code == 204
        assert progress(north, round_id)[0] == "500"
        assert north.put(round_id, first).status_code == 200  # a PUT ends a resumable upload
        assert progress(north, round_id)[2] == "?1"
        assert transfers(api, round_id) == 0

    def test_more_bytes_than_announced(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        whole = update_body(north.plan, {}, 1)
        assert north.patch(round_id, whole[:1000], 0, whole).status_code == 204
        answer = north.patch(round_id, whole[1000:] + b"x", 1000, whole)
        assert problem_of(answer) == (422, "too-many-bytes")
        assert progress(north, round_id)[0] == "1000"
        assert north.patch(round_id, whole[1000:], 1000, whole).status_code == 200

    def test_a_length_over_the_limit(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
        limit = server_half(north.plan).update_spec({}).max_total_bytes
        answer = north.patch(round_id, b"x", 0, b"x" * (limit + 1))
        assert problem_of(answer) == (413, "too-large")
        assert transfers(api, round_id) == 0

    def test_headers_that_are_missing_or_wrong(self, api: SocketApi) -> None:
        round_id, north, _ = two_sites(api)
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
        assert transfers(api, round_id) == 0

    def test_a_whole_that_is_wrong_is_dropped(self, api: SocketApi) -> None:
        """What is wrong stays wrong: the next attempt begins at byte 0."""
        round_id, north, _ = two_sites(api)
        right = update_body(north.plan, {}, 1)
        damaged = right[:-4] + b"\0\0\0\0"
        assert north.patch(round_id, damaged[:1000], 0, right).status_code == 204
        assert problem_of(north.patch(round_id, damaged[1000:], 1000, right)) == (422, "digest-mismatch")
        assert progress(north, round_id) == ("0", None, "?0")
        nonsense = b"not tensors at all"
        assert problem_of(north.patch(round_id, nonsense, 0, nonsense)) == (422, "invalid-tensors")
        assert progress(north, round_id) == ("0", None, "?0")
        assert north.patch(round_id, right, 0, right).status_code == 200

    def test_torn(self, api: SocketApi, caplog: pytest.LogCaptureFixture) -> None:
        """What was read when the connection broke is kept, also what had not been stored by then."""
        caplog.set_level(logging.INFO)
        plan = large_plan()
        round_id, (site,) = open_round(api, plan, "north")
        whole = update_body(plan, {}, 1)
        sent = CHUNK_BYTES + 1_000_000
        with send_part(api, site, round_id, whole, 0, sent):
            eventually(lambda: progress(site, round_id)[0] != "0")
        eventually(lambda: f"PATCH /v1/rounds/{round_id}/update 408" in caplog.messages)
        kept = int(str(progress(site, round_id)[0]))
        assert CHUNK_BYTES <= kept <= sent
        answer = site.patch(round_id, whole[kept:], kept, whole)
        assert (answer.status_code, answer.json()["digest"]) == (200, digest(whole))

    @pytest.mark.parametrize("method", ["PUT", "PATCH"])
    def test_on_a_slow_link(self, api: SocketApi, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        """Bytes are stored as time goes by, not only when a chunk is full: the round sees that they still come."""
        monkeypatch.setattr(rounds, "FLUSH_S", 0)
        round_id, north, _ = two_sites(api)
        whole = update_body(north.plan, {}, 1)
        with send_part(api, north, round_id, whole, 0, 1, method) as connection:
            stored = 0
            for begin in range(1, 10):
                eventually(lambda begin=begin: arrived(api, round_id) == (begin, True))  # type: ignore[misc]
                stored, _ = arrived(api, round_id)
                connection.send(whole[begin : begin + 1])
                eventually(lambda before=stored: arrived(api, round_id)[0] > before)  # type: ignore[misc]
            assert stored == 9
            connection.send(whole[10:])
            status, _ = connection.answer()
        assert status == 200

    def test_two_at_once(self, api: SocketApi) -> None:
        """A part that comes while another request still appends does not mix with it."""
        plan = large_plan()
        round_id, (site,) = open_round(api, plan, "north")
        whole = update_body(plan, {}, 1)
        with send_part(api, site, round_id, whole, 0, CHUNK_BYTES + 10) as connection:
            eventually(lambda: progress(site, round_id)[0] != "0")
            stored = int(str(progress(site, round_id)[0]))
            assert site.patch(round_id, whole[stored : stored + 99], stored, whole).status_code == 204
            connection.send(whole[CHUNK_BYTES + 10 :])
            status, answer = connection.answer()
        assert (status, b'"code":"offset-mismatch"' in answer) == (409, True)
        assert progress(site, round_id)[0] == str(stored + 99)
        assert site.patch(round_id, whole[stored + 99 :], stored + 99, whole).status_code == 200


@pytest.mark.parametrize("empty_db_url", ["sqlite"], indirect=True)
def test_a_resumed_upload_outlives_the_coordinator(db_url: str, tmp_path: Path) -> None:
    """Killed with kill -9 in the middle of a PATCH: the next process goes on at the stored byte."""
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
        follow(site, 1)
        (view,) = second.admin("GET", f"/v1/federations/{plan.name}/rounds")
        assert [upload["digest"] for upload in view["uploads"]] == [digest(whole)]
