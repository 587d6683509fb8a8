"""A client that does everything but train: it polls, downloads the model and uploads the same update every round.

It sends the requests of an agent over one keep-alive connection, but skips the checks and copies of an agent, so that
the clients take as little as possible of the CPU that they share with the coordinator.
"""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from client_agent.coordinator.client import RESUMABLE_BYTES
from client_agent.coordinator.connection import LONG_POLL_S
from client_agent.coordinator.downloads import PIECE_BYTES
from shared.contract import versions
from shared.contract.errors import DistransError
from shared.contract.messages import TaskAnswer
from shared.tensors.wire import digest, digest_header

_TIMEOUT_S = 600.0  # on a busy machine, the last of many uploads is acknowledged late
_TRIES = 20
_SCRATCH = bytearray(PIECE_BYTES)  # all clients drop what they download here


class Stopped(Exception):
    """The measurement has been stopped."""


@dataclass(frozen=True)
class UpdateBody:
    """The update that all clients send, with the header that names its digest."""

    data: bytes
    digest: str

    @classmethod
    def of(cls, data: bytes) -> "UpdateBody":
        """Return the body with its digest."""
        return cls(data, digest_header(digest(data)))

    def pieces(self, offset: int) -> Iterator[memoryview]:
        """Yield the rest of the body in the pieces that an agent sends."""
        view = memoryview(self.data)
        for begin in range(offset, len(view), PIECE_BYTES):
            yield view[begin : begin + PIECE_BYTES]


class ThinClient:
    """One enrolled client."""

    def __init__(self, url: str, token: str, update: UpdateBody, stopping: threading.Event) -> None:
        self._address, self._update, self._stopping = urlsplit(url).netloc, update, stopping
        self._headers = {"Authorization": f"Bearer {token}", versions.HEADER: str(versions.PROTOCOL)}
        self._connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def task(self, after: str) -> TaskAnswer:
        """Wait for a task newer than `after`."""
        answer = self._call("GET", f"/v1/task?wait={LONG_POLL_S:g}&after={after}")
        return TaskAnswer.model_validate_json(answer.body)

    def download(self, task: TaskAnswer) -> None:
        """Receive the model and the client's personal tensors, and drop them."""
        if task.model is None or task.personal_url is None:
            raise DistransError("The coordinator opened a round without a model.")
        for url in (task.model.url, task.personal_url):
            self._call("GET", url, keeps_body=False)

    def upload(self, url: str) -> float:
        """Send the update in one piece or, like an agent, as a resumable upload; return when it was acknowledged."""
        data = self._update.data
        if len(data) <= RESUMABLE_BYTES:
            self._call("PUT", url, data, {"Content-Digest": self._update.digest})
        else:
            self._retry("PATCH", lambda: self._send_rest(url), url)
        return time.perf_counter()

    def _send_rest(self, url: str) -> "_Answer":
        offset = int(self._call("HEAD", url).headers.get("upload-offset", "0"))
        headers = {
            "Upload-Offset": str(offset),
            "Upload-Length": str(len(self._update.data)),
            "Repr-Digest": self._update.digest,
            "Content-Length": str(len(self._update.data) - offset),
        }
        return self._request("PATCH", url, self._update.pieces(offset), headers)

    def _call(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        keeps_body: bool = True,
    ) -> "_Answer":
        return self._retry(method, lambda: self._request(method, url, body, headers or {}, keeps_body=keeps_body), url)

    def _retry(self, method: str, attempt: Any, url: str) -> "_Answer":
        """Repeat a request after a broken connection and while the coordinator asks for patience."""
        reason = ""
        for number in range(_TRIES):
            if self._stopping.wait(min(number, 5)):
                break
            try:
                answer: _Answer = attempt()
            except (http.client.HTTPException, OSError) as error:
                self._connection.close()  # the next request opens it again
                reason = str(error) or type(error).__name__
                continue
            if answer.status < HTTPStatus.BAD_REQUEST:
                return answer
            reason = f"HTTP {answer.status}: {answer.detail}"
            if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status not in (408, 409, 429):
                break
        if self._stopping.is_set():
            raise Stopped
        raise DistransError(f"{method} {url} failed: {reason}", next_step="Try again, or with fewer clients.")

    def _request(
        self, method: str, url: str, body: Any, headers: dict[str, str], *, keeps_body: bool = True
    ) -> "_Answer":
        self._connection.request(method, url, body, self._headers | headers)
        response = self._connection.getresponse()
        if keeps_body or response.status >= HTTPStatus.BAD_REQUEST:
            content = response.read()
        else:
            content = b""
            while response.readinto(_SCRATCH):
                pass
        return _Answer(response.status, response.headers, content)


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def detail(self) -> str:
        """What went wrong, as the coordinator says it."""
        try:
            return str(json.loads(self.body)["detail"])
        except (ValueError, KeyError, TypeError):
            return self.body[:200].decode(errors="replace")
