"""Liveness, readiness and metrics."""

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.engine import make_url
from support.api import SCRAPE_TOKEN, Api, open_api, problem_of
from support.api_calls import unique_plan, upload_update
from support.coordinator import ADMIN_TOKEN
from support.databases import migrate, new_postgres_database

from shared import __version__


class TestOperations:
    def test_the_root_leads_to_the_sign_in(self, api: Api) -> None:
        answer = api.http.get("/", follow_redirects=False)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/sign-in")

    def test_a_running_coordinator_is_alive_and_ready(self, api: Api) -> None:
        assert api.call("GET", "/healthz", None).json() == {"status": "ok", "version": __version__}
        assert api.call("GET", "/readyz", None).json() == {"status": "ready"}

    @pytest.mark.parametrize("token", [ADMIN_TOKEN, SCRAPE_TOKEN])
    def test_metrics_show_the_state_of_a_federation(self, api: Api, token: str) -> None:
        plan = unique_plan(rounds={"count": 1})
        api.create(plan)
        site = api.join(plan, "north", {"cat": 1})
        upload_update(site)
        site.wait_for_model(1)
        answer = api.call("GET", "/metrics", token)
        assert answer.headers["Content-Type"].startswith("text/plain")
        found = {
            (sample.name, sample.labels.get("state") or sample.labels.get("client")): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.labels.get("federation") in (plan.name, None)
        }
        assert found.pop(("distrans_client_silent_seconds", "north")) >= 0
        assert found.pop(("distrans_blob_bytes", None)) > 0
        assert found == {
            ("distrans_rounds_done", None): 1,
            ("distrans_federation_state", "finished"): 1,
            ("distrans_clients", "active"): 1,
            ("distrans_rounds", "done"): 1,
            ("distrans_updates", None): 1,
        }

    def test_without_a_scrape_token_no_other_token_can_scrape(self, db_url: str) -> None:
        with open_api(db_url) as api:
            api.app.state.settings = type(api.app.state.settings)(db_url, ADMIN_TOKEN)
            for token in ("", "None", SCRAPE_TOKEN):
                assert api.call("GET", "/metrics", token).status_code == 401
            assert api.call("GET", "/metrics", ADMIN_TOKEN).status_code == 200

    def test_a_lost_database_gives_503_until_it_is_back(
        self, postgres_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        url = new_postgres_database(postgres_url)
        name = make_url(url).database
        migrate(url)
        with open_api(url) as api:
            assert api.call("GET", "/readyz", None).status_code == 200
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
            for path in ("/readyz", "/v1/federations", "/metrics"):
                answer = api.call("GET", path)
                assert problem_of(answer) == (503, "database-unavailable")
                assert int(answer.headers["Retry-After"]) > 0
            assert api.call("GET", "/healthz", None).status_code == 200
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"')
            migrate(url)
            assert api.call("GET", "/readyz", None).status_code == 200
            assert api.call("GET", "/v1/federations").json() == []
        (first, *_) = [record for record in caplog.records if record.getMessage() == "the database failed"]
        assert first.exc_info is not None
        assert f'database "{name}" does not exist' in str(first.exc_info[1])
