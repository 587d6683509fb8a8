"""Resumable uploads as in draft-ietf-httpbis-resumable-upload, by clients that follow the draft."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.api import SocketApi
from support.coordinator import Site
from support.databases import new_database
from support.halves import server_half
from support.plans import small_plan, update_body

from shared.tensors.wire import digest, digest_header

NUMBERS = itertools.count(1)
IANA = "https://iana.org/assignments/http-problem-types#"


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketApi]:
    """Run on SQLite; test_api_upload_parts has the calls agents make, on PostgreSQL too."""
    with SocketApi(new_database("sqlite", request, tmp_path_factory.mktemp("resumable"))) as api:
        yield api


class Uploading:
    """A site in a round that stays open, because another site never uploads."""

    def __init__(self, api: SocketApi) -> None:
        plan = small_plan(f"draft-{next(NUMBERS)}", method={"name": "fedavg"}, rounds={"min_clients": 2})
        api.create(plan)
        self.site, self.other = (api.join(plan, name, {"cat": 1}) for name in ("north", "south"))
        task = self.other.task()
        assert task.round is not None
        self.url, self.round_id = task.round.update_url, task.round.id
        self.whole = update_body(plan, {}, 1)
        self.max_bytes = server_half(plan).update_spec({}).max_total_bytes

    def send(self, method: str, url: str | None = None, body: bytes | None = None, **headers: Any) -> httpx.Response:
        """Send a request with these headers, and no others from the draft; underscores stand for hyphens."""
        named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
        return self.site.http.request(method, url or self.url, content=body, headers=self.site.headers | named)

    def create(self, body: bytes = b"", **headers: Any) -> str:
        """Start an upload with POST; return its URL."""
        answer = self.send("POST", body=body, **({"Upload_Complete": "?0"} | headers))
        assert (answer.status_code, answer.headers["Upload-Complete"]) == (201, "?0"), answer.text
        return answer.headers["Location"]


@pytest.fixture
def uploading(api: SocketApi) -> Uploading:
    return Uploading(api)


def problem(answer: httpx.Response) -> tuple[int, str, str]:
    """Return the status, our code, and the problem type."""
    body = answer.json()
    return answer.status_code, body["code"], body["type"].removeprefix(IANA)


def test_an_upload_needs_neither_length_nor_digest(uploading: Uploading) -> None:
    """The last part says that it is the last one."""
    whole, part = uploading.whole, {"Content_Type": "application/partial-upload"}
    location = uploading.create()
    head = uploading.send("HEAD", location)
    assert (head.headers["Upload-Offset"], head.headers["Upload-Complete"], "Upload-Length" in head.headers) == (
        "0",
        "?0",
        False,
    )
    assert head.headers["Upload-Limit"] == f"max-size={uploading.max_bytes}"
    assert head.headers["Cache-Control"] == "no-store"
    first = uploading.send("PATCH", location, whole[:7000], Upload_Offset=0, Upload_Complete="?0", **part)
    assert (first.status_code, first.headers["Upload-Offset"], first.headers["Upload-Complete"]) == (204, "7000", "?0")
    last = uploading.send("PATCH", location, whole[7000:], Upload_Offset=7000, Upload_Complete="?1", **part)
    assert (last.status_code, last.headers["Upload-Complete"], last.json()["digest"]) == (200, "?1", digest(whole))
    done = uploading.send("HEAD", location)
    assert (done.headers["Upload-Complete"], done.headers["Upload-Length"]) == ("?1", str(len(whole)))


def test_the_creating_request_may_contain_the_whole(uploading: Uploading) -> None:
    answer = uploading.send("POST", body=uploading.whole, Upload_Complete="?1")
    assert (answer.status_code, answer.json()["digest"]) == (200, digest(uploading.whole))
    assert (answer.headers["Upload-Complete"], answer.headers["Upload-Offset"]) == ("?1", str(len(uploading.whole)))


def test_any_request_may_bring_length_and_digest(uploading: Uploading) -> None:
    """They apply to the rest of the upload, and HEAD returns the length."""
    whole = uploading.whole
    known = {"Upload_Length": len(whole), "Repr_Digest": digest_header(digest(whole))}
    first = uploading.send("PATCH", body=whole[:10], Upload_Offset=0, **known)
    assert (first.status_code, first.headers["Upload-Length"]) == (204, str(len(whole)))
    assert uploading.send("HEAD").headers["Upload-Length"] == str(len(whole))
    assert uploading.send("PATCH", body=whole[10:20], Upload_Offset=10).status_code == 204
    damaged = whole[20:-1] + bytes([whole[-1] ^ 1])
    refused = uploading.send("PATCH", body=damaged, Upload_Offset=20)
    assert problem(refused)[:2] == (422, "digest-mismatch")
    assert refused.headers["Upload-Complete"] == "?1"  # complete: resuming would not help
    assert uploading.send("HEAD").headers["Upload-Offset"] == "0"


def test_bytes_alone_do_not_complete_an_upload(uploading: Uploading) -> None:
    """With ?0, an upload that has all its bytes still waits for the request that completes it, here an empty one."""
    whole = uploading.whole
    location = uploading.create(whole, Upload_Length=len(whole))
    assert uploading.send("HEAD", location).headers["Upload-Offset"] == str(len(whole))
    ended = uploading.send("PATCH", location, b"", Upload_Offset=len(whole), Upload_Complete="?1")
    assert (ended.status_code, ended.json()["size_bytes"]) == (200, len(whole))


def test_a_wrong_offset_names_the_right_one(uploading: Uploading) -> None:
    location = uploading.create(uploading.whole[:100])
    answer = uploading.send("PATCH", location, b"x", Upload_Offset=5, Upload_Complete="?0")
    assert problem(answer) == (409, "offset-mismatch", "mismatching-upload-offset")
    assert (answer.json()["expected-offset"], answer.json()["provided-offset"]) == (100, 5)
    assert (answer.headers["Upload-Offset"], answer.headers["Upload-Complete"]) == ("100", "?0")


def test_contradictory_lengths_are_refused(uploading: Uploading) -> None:
    whole = uploading.whole
    location = uploading.create(whole[:100], Upload_Length=len(whole))
    other = uploading.send(
        "PATCH", location, b"x", Upload_Offset=100, Upload_Complete="?0", Upload_Length=len(whole) + 1
    )
    assert problem(other) == (400, "inconsistent-length", "inconsistent-upload-length")
    early = uploading.send("PATCH", location, whole[100:200], Upload_Offset=100, Upload_Complete="?1")
    assert problem(early) == (400, "inconsistent-length", "inconsistent-upload-length")
    both = uploading.send("POST", body=b"abc", Upload_Complete="?1", Upload_Length=7)
    assert problem(both) == (400, "inconsistent-length", "inconsistent-upload-length")
    assert uploading.send("HEAD", location).headers["Upload-Offset"] == "100"
    rest = uploading.send("PATCH", location, whole[100:], Upload_Offset=100, Upload_Complete="?1")
    assert rest.status_code == 200


def test_a_length_below_the_stored_bytes_is_refused(uploading: Uploading) -> None:
    location = uploading.create(uploading.whole[:100])
    short = uploading.send("PATCH", location, b"", Upload_Offset=100, Upload_Complete="?0", Upload_Length=50)
    assert problem(short) == (400, "inconsistent-length", "inconsistent-upload-length")
    rest = uploading.send("PATCH", location, uploading.whole[100:], Upload_Offset=100, Upload_Complete="?1")
    assert rest.status_code == 200


def test_another_digest_does_not_replace_a_named_upload(uploading: Uploading) -> None:
    digests = [digest_header(digest(body)) for body in (uploading.whole, b"another")]
    location = uploading.create(Repr_Digest=digests[0])
    changed = uploading.send("PATCH", location, b"an", Upload_Offset=0, Upload_Complete="?0", Repr_Digest=digests[1])
    assert problem(changed)[:2] == (422, "digest-changed")
    assert uploading.send("PATCH", location, uploading.whole, Upload_Offset=0, Upload_Complete="?1").status_code == 200


def test_a_repeated_upload_has_the_same_size_limit(uploading: Uploading) -> None:
    assert uploading.send("POST", body=uploading.whole, Upload_Complete="?1").status_code == 200
    pieces: Any = iter([bytes(uploading.max_bytes), b"x"])  # chunked: the length is not announced
    assert uploading.send("POST", body=pieces, Upload_Complete="?1").status_code == 413


def test_a_chunked_body_that_ends_too_early_keeps_what_arrived(uploading: Uploading) -> None:
    """Only its end shows that bytes are missing."""
    location = uploading.create(Upload_Length=len(uploading.whole))
    pieces: Any = iter([uploading.whole[:50], uploading.whole[50:80]])
    answer = uploading.send("PATCH", location, pieces, Upload_Offset=0, Upload_Complete="?1")
    assert problem(answer) == (400, "inconsistent-length", "inconsistent-upload-length")
    assert uploading.send("HEAD", location).headers["Upload-Offset"] == "80"


def test_an_upload_over_the_limit_is_refused(uploading: Uploading) -> None:
    """413 with the limit, by the announced length or, without one, as the bytes arrive."""
    limit = f"max-size={uploading.max_bytes}"
    announced = uploading.send("POST", Upload_Complete="?0", Upload_Length=uploading.max_bytes + 1)
    assert (problem(announced)[:2], announced.headers["Upload-Limit"]) == ((413, "too-large"), limit)
    silent = uploading.send("POST", body=bytes(uploading.max_bytes + 1), Upload_Complete="?0")
    assert (problem(silent)[:2], silent.headers["Upload-Limit"]) == ((413, "too-large"), limit)


def test_cancelled_upload_is_gone_and_a_new_one_may_start(uploading: Uploading) -> None:
    location = uploading.create(uploading.whole[:100])
    assert uploading.send("DELETE", location).status_code == 204
    for method, headers in (("HEAD", {}), ("DELETE", {}), ("PATCH", {"Upload_Offset": 100, "Upload_Complete": "?1"})):
        assert uploading.send(method, location, **headers).status_code == 404
    assert uploading.send("HEAD").headers["Upload-Offset"] == "0"
    assert uploading.send("DELETE").status_code == 204  # idempotent
    assert uploading.site.put(uploading.round_id, uploading.whole).status_code == 200


def test_an_accepted_update_cannot_be_cancelled_or_changed(uploading: Uploading) -> None:
    location = uploading.create()
    sent = uploading.send("PATCH", location, uploading.whole, Upload_Offset=0, Upload_Complete="?1")
    assert sent.status_code == 200
    for answer in (
        uploading.send("DELETE", location),
        uploading.send("PATCH", location, b"", Upload_Offset=len(uploading.whole), Upload_Complete="?1"),
        uploading.send("POST", Upload_Complete="?0"),
    ):
        assert problem(answer) == (409, "already-uploaded", "completed-upload")
    repeated = uploading.site.patch(uploading.round_id, uploading.whole, 0, uploading.whole)  # the same digest
    assert (repeated.status_code, repeated.json()) == (200, sent.json())


def test_a_newer_upload_ends_the_older_one(uploading: Uploading) -> None:
    """A client that uses the older one's URL cannot mix its bytes with the newer one's."""
    older = uploading.create(uploading.whole[:100])
    newer = uploading.create()
    stale = uploading.send("PATCH", older, uploading.whole[100:], Upload_Offset=100, Upload_Complete="?1")
    assert problem(stale)[:2] == (404, "no-such-upload")
    assert uploading.send("HEAD", older).status_code == 404
    assert uploading.send("HEAD", newer).headers["Upload-Offset"] == "0"


def test_a_site_cannot_reach_another_sites_upload(uploading: Uploading) -> None:
    location = uploading.create(uploading.whole[:100])
    stranger: Site = uploading.other
    for method in ("HEAD", "DELETE"):
        assert stranger.http.request(method, location, headers=stranger.headers).status_code == 404
    assert uploading.send("HEAD", location).headers["Upload-Offset"] == "100"


def test_unknown_values_are_ignored_as_the_draft_says(uploading: Uploading) -> None:
    location = uploading.create()
    odd = uploading.send("PATCH", location, uploading.whole[:9], Upload_Offset=0, Upload_Complete="yes")
    assert (odd.status_code, odd.headers["Upload-Complete"]) == (204, "?0")
    assert problem(uploading.send("POST", Upload_Complete="yes"))[:2] == (422, "invalid-request")
