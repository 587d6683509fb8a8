"""Requests cut off by a shutdown."""

import asyncio
import json
import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from shared.http.unexpected_errors import UnexpectedErrors

SCOPE: Scope = {"type": "http", "method": "PUT", "path": "/v1/a\nb", "headers": []}


async def cut_off(*, after_start: bool) -> list[Message]:
    """Return what is sent when the server gives up waiting for a request and cancels it."""
    sent: list[Message] = []
    waiting = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if after_start:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        waiting.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError("unexpected read")

    async def send(message: Message) -> None:
        sent.append(message)

    task = asyncio.create_task(UnexpectedErrors(app, "coordinator")(SCOPE, receive, send))  # type: ignore[arg-type]
    await waiting.wait()
    task.cancel()
    await task  # must not raise: uvicorn would log a traceback
    return sent


def test_a_request_cut_off_by_a_shutdown_gets_a_503(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start, body = asyncio.run(cut_off(after_start=False))
    assert start["status"] == 503
    assert (b"retry-after", b"5") in start["headers"]
    assert json.loads(body["body"])["code"] == "stopping"
    assert [record.message for record in caplog.records] == ["PUT /v1/a%0Ab was cut off: the coordinator is stopping"]


def test_a_response_cut_off_after_its_start_just_ends() -> None:
    assert [message["type"] for message in asyncio.run(cut_off(after_start=True))] == ["http.response.start"]
