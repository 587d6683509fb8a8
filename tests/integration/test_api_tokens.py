"""Bad tokens are slowed down, and no token ends up in a log, a table or an error."""

import logging
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.engine import make_url
from support.api import SCRAPE_TOKEN, open_api, problem_of
from support.api_calls import create_invite
from support.coordinator import ADMIN_TOKEN
from support.plans import small_plan

from server.service.settings import Settings
from shared.http.request_id import RequestIdFilter


class TestThrottle:
    def test_repeated_failures_are_slowed_down_while_valid_tokens_pass(self, db_url: str) -> None:
        plan = small_plan()
        with open_api(db_url) as api:
            api.create(plan)
            site = api.join(plan, "north", {"cat": 1})
            calls = [
                ("GET", "/v1/me"),
                ("POST", "/v1/federations/pets/start"),
                ("GET", "/v1/join"),
                ("GET", "/metrics"),
            ]
            for attempt in range(10):
                assert api.call(*calls[attempt % 4], "wrong").status_code == 401
            waits = []
            for method, path in calls:
                answer = api.call(method, path, "wrong")
                assert problem_of(answer) == (429, "too-many-failures")
                waits.append(int(answer.headers["Retry-After"]))
            assert min(waits) >= 1
            assert api.call("GET", "/v1/me", site.token).status_code == 200
            assert api.call("GET", "/v1/federations").status_code == 200
            assert api.call("GET", "/v1/join", create_invite(api, "pets")).status_code == 200
            elsewhere = TestClient(api.app, client=("192.0.2.7", 4711))
            assert elsewhere.get("/v1/me", headers={"Authorization": "Bearer wrong"}).status_code == 401


class TestTokensStaySecret:
    def test_tokens_are_neither_logged_nor_stored_in_clear(self, db_url: str, caplog: pytest.LogCaptureFixture) -> None:
        """Not even at debug level, which logs SQL and its parameters."""
        caplog.set_level(logging.DEBUG)
        caplog.set_level(logging.INFO, logger="sqlalchemy.engine")
        caplog.handler.addFilter(RequestIdFilter())
        plan = small_plan()
        with open_api(db_url) as api:
            api.create(plan)
            token = create_invite(api, "pets")
            joined = api.call("POST", "/v1/join", token, json={"name": "north", "class_counts": {"cat": 1}}).json()
            rotated = api.admin("POST", "/v1/federations/pets/clients/north/rotate")["token"]
            assert api.call("GET", "/v1/me", rotated).status_code == 200
            assert api.call("GET", "/v1/me", joined["token"]).status_code == 401
            assert api.call("GET", "/v1/me", "a-wrong-token-of-somebody").status_code == 401
            assert api.call("GET", "/metrics", SCRAPE_TOKEN).status_code == 200
            audit = api.call("GET", "/v1/audit").text
        secrets = [text.split("_", 2)[2] for text in (token, joined["token"], rotated)]
        secrets += [ADMIN_TOKEN, SCRAPE_TOKEN, "a-wrong-token-of-somebody"]
        logged = "\n".join(str(record.__dict__) + record.getMessage() for record in caplog.records)
        assert "POST /v1/join" in logged
        assert "INSERT INTO clients" in logged
        stored = b""
        if db_url.startswith("sqlite"):
            file = Path(str(make_url(db_url).database))
            stored = b"".join(path.read_bytes() for path in file.parent.glob(file.name + "*"))
        for secret in secrets:
            assert secret not in logged
            assert secret not in audit
            assert secret.encode() not in stored

    def test_settings_do_not_print_their_tokens(self) -> None:
        settings = Settings("sqlite:///x.db", ADMIN_TOKEN, SCRAPE_TOKEN)
        assert ADMIN_TOKEN not in f"{settings!r} {settings}"
        assert SCRAPE_TOKEN not in f"{settings!r} {settings}"
