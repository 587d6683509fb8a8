"""Requests the API rejects: bad bodies, paths, methods and parameters; every error is a problem with a request id."""

import gzip
import json
import logging
import re

import pytest
from support.api import Api, open_api, problem_of
from support.api_calls import unique_plan

from shared.http.request_id import RequestIdFilter


class TestBodies:
    def test_malformed_json_is_refused_with_its_position(self, api: Api) -> None:
        answer = api.call("POST", "/v1/federations", content=b'{"name": ', headers={"Content-Type": "application/json"})
        assert problem_of(answer) == (422, "invalid-request")
        assert answer.json()["errors"] == ["body: not JSON at character 9: Expecting value"]

    def test_body_that_is_not_utf_8_is_refused(self, api: Api) -> None:
        headers = {"Content-Type": "application/json"}
        answer = api.call("POST", "/v1/federations", content=b'{"name": "\xff"}', headers=headers)
        assert problem_of(answer) == (400, "bad-request")

    @pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"text"', b"name=x"])
    def test_body_that_is_not_an_object_is_refused(self, api: Api, body: bytes) -> None:
        for headers in ({"Content-Type": "application/json"}, {"Content-Type": "text/plain"}, {}):
            answer = api.call("POST", "/v1/federations", content=body, headers=headers)
            assert problem_of(answer) == (422, "invalid-request")
            assert answer.json()["errors"][0].startswith("body: ")

    def test_compressed_body_is_refused(self, api: Api) -> None:
        body = gzip.compress(unique_plan().model_dump_json().encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = api.call("POST", "/v1/federations", content=body, headers=headers)
        assert problem_of(answer) == (415, "encoded-body")
        assert (answer.headers["Accept-Encoding"], bool(answer.json()["next_step"])) == ("identity", True)

    def test_a_content_length_over_the_limit_is_refused(self, api: Api) -> None:
        body = json.dumps({"name": "x", "classes": ["a", "b" * 30_000]}).encode()
        answer = api.call("POST", "/v1/federations", content=body, headers={"Content-Type": "application/json"})
        assert problem_of(answer) == (413, "too-large")
        assert "20000 bytes" in answer.json()["detail"]

    def test_a_chunked_body_over_the_limit_is_refused(self, api: Api) -> None:
        """It is refused as it arrives, before it is parsed."""
        pieces = (b"[" * 1000 for _ in range(100))
        answer = api.call("POST", "/v1/federations", content=pieces, headers={"Content-Type": "application/json"})
        assert problem_of(answer) == (413, "too-large")

    def test_a_body_of_exactly_the_limit_is_accepted(self, api: Api) -> None:
        body = b'{"reason": "tea"}'
        body += b" " * (20_000 - len(body))
        plan = unique_plan()
        api.create(plan)
        path = f"/v1/federations/{plan.name}/pause"
        for content in (body, iter([body[:9000], body[9000:]])):
            answer = api.call("POST", path, content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["reason"]) == (200, "tea")

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/federations/%00"),
            ("GET", "/v1/audit?federation=%00"),
            ("POST", "/v1/federations/{name}/clients/%00/revoke"),
            ("GET", "/v1/federations/{name}/rounds?after=2147483648"),
            ("GET", "/v1/federations/{name}/rounds?after=99999999999999999999"),
            ("GET", "/v1/federations/{name}/model?round=99999999999999999999"),
            ("GET", "/v1/audit?after=99999999999999999999"),
            ("GET", "/v1/audit?after=-1"),
            ("GET", "/v1/audit?limit=0"),
            ("GET", "/v1/audit?limit=1001"),
        ],
    )
    def test_values_the_database_cannot_store_are_refused(self, api: Api, method: str, path: str) -> None:
        """They are the caller's error, not the database's; SQLite finds nothing where PostgreSQL raises."""
        plan = unique_plan()
        api.create(plan)
        answer = api.call(method, path.format(name=plan.name))
        assert answer.status_code in (200, 404, 422)
        assert answer.json() == [] or problem_of(answer)[1] in (
            "no-such-federation",
            "no-such-client",
            "unusable-value",
            "invalid-request",
        )

    def test_round_and_model_numbers_out_of_range_are_refused(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan)
        site = api.join(plan, "north", {"cat": 1})
        for number in (-1, 2**31, 10**30):
            for method, path in (
                ("GET", f"/v1/rounds/{number}/personal"),
                ("PUT", f"/v1/rounds/{number}/update"),
                ("PUT", f"/v1/models/{number}/evaluation"),
                ("GET", f"/v1/federations/{plan.name}/personal?model={number}"),
            ):
                answer = api.call(method, path, site.token, json={"samples": 0, "correct": 0, "loss_sum": 0})
                assert problem_of(answer) == (422, "invalid-request")

    def test_a_nul_character_in_a_reason_is_no_server_error(self, api: Api) -> None:
        plan = unique_plan()
        api.create(plan)
        answer = api.call("POST", f"/v1/federations/{plan.name}/pause", json={"reason": "a\0b"})
        assert answer.status_code in (200, 422)  # SQLite can store it


class TestProblems:
    @pytest.mark.parametrize("path", ["/v2", "/v1", "/v1/federations/x/y/z", "/favicon.ico"])
    def test_unknown_paths_are_not_found(self, api: Api, path: str) -> None:
        answer = api.http.get(path, follow_redirects=False)
        assert problem_of(answer) == (404, "not-found")

    @pytest.mark.parametrize(
        ("method", "path"), [("DELETE", "/healthz"), ("PUT", "/v1/federations"), ("POST", "/v1/me")]
    )
    def test_wrong_methods_are_not_allowed(self, api: Api, method: str, path: str) -> None:
        answer = api.call(method, path)
        assert problem_of(answer) == (405, "method-not-allowed")
        assert answer.headers["Allow"]

    @pytest.mark.parametrize(
        ("path", "allowed"),
        [
            ("/v1/me", "DELETE, GET, PATCH"),
            ("/v1/rounds/1/update", "DELETE, HEAD, PATCH, POST, PUT"),
            ("/v1/rounds/1/personal", "GET, HEAD"),
        ],
    )
    def test_allow_names_every_method_of_the_path(self, api: Api, path: str, allowed: str) -> None:
        """Not just those of the first function registered for the path."""
        answer = api.call("OPTIONS", path)
        assert (problem_of(answer), answer.headers["Allow"]) == ((405, "method-not-allowed"), allowed)

    @pytest.mark.parametrize("path", ["/v1/federations/", "/healthz/", "/docs/", "/v1/federations//"])
    def test_a_trailing_slash_is_not_redirected(self, api: Api, path: str) -> None:
        """A redirect would point to the host in the request, which the caller chooses."""
        answer = api.http.get(path, headers={"Host": "evil.example"}, follow_redirects=False)
        assert problem_of(answer) == (404, "not-found")
        assert answer.json()["next_step"] == "Remove the trailing slash."
        assert "evil" not in answer.text + repr(answer.headers)

    @pytest.mark.parametrize(
        ("call", "fault"),
        [
            ("/v1/audit?limits=5", "query.limits: unknown parameter; did you mean limit?"),
            ("/v1/audit?Federation=x", "query.Federation: unknown parameter; did you mean federation?"),
            ("/v1/federations?page=2", "query.page: unknown parameter; this call takes none"),
        ],
    )
    def test_unknown_query_parameters_are_not_ignored(self, api: Api, call: str, fault: str) -> None:
        answer = api.call("GET", call)
        assert (problem_of(answer), answer.json()["errors"]) == ((422, "invalid-request"), [fault])
        assert problem_of(api.call("GET", call, token="nobody's")) == (401, "invalid-token")

    def test_health_checks_accept_any_parameters(self, api: Api) -> None:
        """Monitors and load balancers add their own."""
        assert api.call("GET", "/healthz?source=monitor").status_code == 200
        assert api.call("GET", "/readyz?source=monitor").status_code == 200

    def test_unexpected_error_reveals_only_the_request_id(self, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
        """The caller gets the request id and no details; the log has them under that id."""
        caplog.handler.addFilter(RequestIdFilter())

        def boom() -> None:
            raise RuntimeError("an internal secret")

        with open_api(db_url) as api:
            api.app.add_api_route("/boom", boom)
            answer = api.call("GET", "/boom", headers={"X-Request-ID": "ticket-17"})
        assert problem_of(answer) == (500, "internal-error")
        assert answer.json()["request_id"] == "ticket-17"
        assert "secret" not in answer.text
        (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert logged.exc_info is not None
        assert str(logged.exc_info[1]) == "an internal secret"
        assert logged.__dict__["request_id"] == "ticket-17"


class TestRequestIds:
    @pytest.mark.parametrize("given", ["a", "0d9f0c", "Trace_1.2-3", "x" * 64])
    def test_a_valid_id_is_kept(self, api: Api, given: str) -> None:
        answer = api.call("GET", "/v1/federations/atlantis", headers={"X-Request-ID": given})
        assert (answer.headers["X-Request-ID"], answer.json()["request_id"]) == (given, given)

    @pytest.mark.parametrize("given", ["", " ", "x" * 65, "a b", "a\tb", "é", "<script>", "a/b"])
    def test_malformed_id_is_replaced(self, api: Api, given: str) -> None:
        headers = {"X-Request-ID": given.encode("latin-1")}
        answer = api.call("GET", "/v1/federations/atlantis", headers=headers)
        created = answer.headers["X-Request-ID"]
        assert re.fullmatch(r"[0-9a-f]{16}", created)
        assert answer.json()["request_id"] == created

    def test_every_request_gets_a_different_id(self, api: Api) -> None:
        ids = {api.call("GET", "/healthz").headers["X-Request-ID"] for _ in range(20)}
        assert len(ids) == 20

    def test_the_access_log_has_the_id(self, api: Api, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        caplog.handler.addFilter(RequestIdFilter())
        api.call("GET", "/v1/audit?limit=2", headers={"X-Request-ID": "ticket-18"})
        (line,) = [record for record in caplog.records if record.name == "server.access"]
        assert line.getMessage() == "GET /v1/audit 200"
        logged = line.__dict__
        assert (logged["request_id"], logged["status"], logged["path"]) == ("ticket-18", 200, "/v1/audit")
        assert logged["client_address"] == "testclient"
        assert logged["duration_ms"] >= 0

    def test_a_path_cannot_forge_a_log_line(self, api: Api, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        api.call("GET", "/v1/x%0A2026-01-01 INFO all is well%1B[2J")
        (line,) = [record for record in caplog.records if record.name == "server.access"]
        assert line.getMessage() == "GET /v1/x%0A2026-01-01%20INFO%20all%20is%20well%1B%5B2J 404"
