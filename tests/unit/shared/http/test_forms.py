from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from shared.http.forms import BadForm, read_form


def client() -> TestClient:
    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(await read_form(request, max_bytes=1000))
        except BadForm as error:
            return JSONResponse(str(error), 400)

    return TestClient(Starlette(routes=[Route("/", answer, methods=["POST"])]))


def test_fields_are_returned_without_surrounding_whitespace() -> None:
    answer = client().post("/", data={"token": " let me in\n", "empty": ""})
    assert answer.json() == {"token": "let me in", "empty": ""}


@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (b"a=" + b"x" * 1000, "application/x-www-form-urlencoded", "more than 1000 bytes"),
        (b"&".join(b"a=" for _ in range(201)), "application/x-www-form-urlencoded", "cannot be read"),
        (b"a=\xff", "application/x-www-form-urlencoded", "cannot be read"),
        (b"{}", "application/json", "content type 'application/json'"),
    ],
)
def test_what_is_no_small_form_is_refused(body: bytes, kind: str, reason: str) -> None:
    answer = client().post("/", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert reason in answer.json()


def test_an_endless_body_is_cut_off() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100

    import anyio

    async def read() -> None:
        pieces = endless()

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": await anext(pieces), "more_body": True}

        headers = [(b"content-type", b"application/x-www-form-urlencoded")]
        await read_form(Request({"type": "http", "headers": headers, "method": "POST"}, receive))

    with pytest.raises(BadForm, match="more than 65536 bytes"):
        anyio.run(read)
