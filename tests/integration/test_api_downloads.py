"""Downloads of models and personal tensors: caching, ranges, digests."""

import pytest
from support.api import SocketApi, problem_of
from support.api_calls import large_plan, open_round, unique_plan
from support.coordinator import Site
from support.plans import update_body

from server.store.blobs import CHUNK_BYTES
from shared.tensors.wire import digest, digest_header


class TestDownloads:
    @pytest.fixture(scope="module")
    @staticmethod
    def model(socket_api: SocketApi) -> tuple[Site, str, bytes]:
        """Return a site, the URL of a model of several chunks, and its bytes."""
        plan = large_plan()
        _, (site,) = open_round(socket_api, plan, "north")
        url = f"/v1/federations/{plan.name}/model?round=0"
        body = site.http.get(url, headers=site.headers).content
        assert len(body) > 2 * CHUNK_BYTES
        return site, url, body

    def test_every_download_has_its_digest_as_etag(self, socket_api: SocketApi) -> None:
        """HEAD has the same headers, without the body."""
        plan = unique_plan()
        round_id, (site,) = open_round(socket_api, plan, "north")
        task = site.task()
        assert task.model is not None
        digests = []
        for url in (
            task.model.url,
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
        assert set(digests[:2]) == {task.model.digest}
        assert task.model.digest not in digests[2:]

    def test_a_known_body_is_not_sent_again(self, model: tuple[Site, str, bytes]) -> None:
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
    def test_range_returns_exactly_these_bytes(
        self, model: tuple[Site, str, bytes], wanted: str, begin: int, end: int | None
    ) -> None:
        site, url, body = model
        answer = site.http.get(url, headers=site.headers | {"Range": wanted})
        assert (answer.status_code, answer.content) == (206, body[begin:end])
        first = range(len(body))[begin]
        assert answer.headers["Content-Range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(body)}"
        assert answer.headers["Content-Length"] == str(len(answer.content))
        assert answer.headers["ETag"] == f'"{digest(body)}"'

    def test_range_past_the_end_is_refused(self, model: tuple[Site, str, bytes]) -> None:
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
    def test_an_invalid_range_is_ignored(self, model: tuple[Site, str, bytes], wanted: str) -> None:
        site, url, body = model
        answer = site.http.get(url, headers=site.headers | {"Range": wanted})
        assert (answer.status_code, answer.content) == (200, body)

    def test_head_ignores_a_range(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        head = site.http.head(url, headers=site.headers | {"Range": "bytes=0-9"})
        assert (head.status_code, head.headers["Content-Length"]) == (200, str(len(body)))

    def test_if_range_sends_the_whole_body_if_it_has_changed(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        headers = site.headers | {"Range": "bytes=10-"}
        same = site.http.get(url, headers=headers | {"If-Range": f'"{digest(body)}"'})
        assert (same.status_code, same.content) == (206, body[10:])
        for stale in ('"another"', f'W/"{digest(body)}"', "Mon, 16 Nov 2026 00:00:00 GMT"):
            answer = site.http.get(url, headers=headers | {"If-Range": stale})
            assert (answer.status_code, answer.content) == (200, body)

    def test_an_interrupted_download_can_be_resumed(self, model: tuple[Site, str, bytes]) -> None:
        site, url, body = model
        with site.http.stream("GET", url, headers=site.headers) as answer:
            first = next(answer.iter_bytes(1_000_000))
            tag = answer.headers["ETag"]
        rest = site.http.get(url, headers=site.headers | {"Range": f"bytes={len(first)}-", "If-Range": tag})
        assert first + rest.content == body

    def test_personal_tensors_of_a_superseded_model_are_gone(self, socket_api: SocketApi) -> None:
        plan = unique_plan()
        round_id, (site,) = open_round(socket_api, plan, "north")
        task = site.task()
        assert site.put(round_id, update_body(plan, task.facts)).status_code == 200
        site.wait_for_model(1)
        for url in (f"/v1/rounds/{round_id}/personal", f"/v1/federations/{plan.name}/personal?model=0"):
            assert problem_of(site.http.get(url, headers=site.headers)) == (410, "model-superseded")
        answer = site.http.get(f"/v1/federations/{plan.name}/personal?model=2", headers=site.headers)
        assert problem_of(answer) == (404, "no-such-model")
        assert site.http.get(f"/v1/federations/{plan.name}/model?round=0", headers=site.headers).status_code == 200
