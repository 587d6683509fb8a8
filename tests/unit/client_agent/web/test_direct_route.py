"""Requests without a query, which skip FastAPI's machinery, are answered like the others."""

from collections.abc import Iterator

import pytest
from support.agent_service import Service, bundle, image

from client_agent.settings import ServeOptions

QUERIES: list[dict[str, str]] = [{}, {"top_k": "3"}]  # the second one states the default


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    one = Service(ServeOptions(token="let-me-in"), bundle())
    yield one
    one.queue.stop()


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer let-me-in2", "Basic let-me-in", "let-me-in", "Bearer é"],
)
def test_a_wrong_token_is_refused(service: Service, query: dict[str, str], authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    answer = service.http.post(
        "/predict", content=image(), params=query, headers={"content-type": "image/png"} | headers
    )
    assert (answer.status_code, answer.json()["code"]) == (401, "invalid-token")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("authorization", ["Bearer let-me-in", "bearer let-me-in", "BEARER  let-me-in "])
def test_the_token_is_accepted(service: Service, query: dict[str, str], authorization: str) -> None:
    headers = {"content-type": "image/png", "authorization": authorization}
    answer = service.http.post("/predict", content=image(), params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["predictions"][0]["top_k"]) == 3


def test_the_query_does_not_change_the_answer(service: Service) -> None:
    headers = {"content-type": "image/png", "authorization": "Bearer let-me-in", "x-request-id": "same"}
    answers = [service.http.post("/predict", content=image(), params=query, headers=headers) for query in QUERIES]
    assert answers[0].json() == answers[1].json()
