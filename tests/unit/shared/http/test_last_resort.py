"""Requests that end in a way that nobody planned."""

import asyncio
import json
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from shared.http.last_resort import LastResort

SCOPE: Scope = {"type": "http", "method": "PUT", "path": "/v1/a\nb", "headers": []}


async def cut_off(*, after_start: bool) -> list[Message]:
    """What is sent when the server cancels a request that it has waited for long enough."""
    sent: list[Message] = []
    waiting = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        waiting.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        sent.append(message)

    task = asyncio.create_task(LastResort(app, "coordinator")(SCOPE, receive, send))  # type: ignore[arg-type]
    await waiting.wait()
    task.cancel()
    await task  # ends without an exception, which uvicorn would log with a traceback
    return sent


def test_a_request_that_is_cut_off_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start, body = asyncio.run(cut_off(after_start=False))
    assert start["status"] == 503
    assert (b"retry-after", b"5") in start["headers"]
    assert json.loads(body["body"])["code"] == "stopping"
    assert [record.message for record in caplog.records] == ["PUT /v1/a%0Ab was cut off: the coordinator is stopping"]


def test_an_answer_that_is_cut_off_just_ends() -> None:
    assert [message["type"] for message in asyncio.run(cut_off(after_start=True))] == ["http.response.start"]
