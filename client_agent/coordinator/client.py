"""The coordinator as the running agent sees it: calls that outlast network errors, restarts and slow links."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from client_agent.coordinator.backoff import Backoff
from client_agent.coordinator.connection import LONG_POLL_S, require_same_origin
from client_agent.coordinator.downloads import PIECE_BYTES, ExpectedDownload, PartialFile
from client_agent.coordinator.outcomes import Done, Outcome, Retry, Value, accepted, failed, parsed, retry_for
from client_agent.errors import AgentEnded, Ending, RequestRefused, StopRequested, TokenRefused, UnusableModel
from shared.contract import versions
from shared.contract.errors import DistransError, ForeignAnswer, WireError
from shared.contract.measurements import EvaluationReport
from shared.contract.messages import ClientView, TaskAnswer, UpdateReceipt
from shared.http.client import explain, read_bounded, request
from shared.tensors.wire import digest_header

logger = logging.getLogger(__name__)
RESUMABLE_BYTES = 8 * 1024 * 1024  # larger uploads are resumable
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_DOWNLOAD_TRIES = 4  # for a body with the wrong content
_SCORE_TRIES = 5  # the federation continues without a score
ENDINGS = {
    "client-revoked": (Ending.REVOKED, "Ask its operator if that was not intended."),
    "client-left": (Ending.LEFT, None),
}
# HEAD responses have no body to name the problem.
_HEAD_CODES = {401: "invalid-token", 403: "not-a-participant", 404: "no-such-round", 410: "round-closed"}


class Coordinator:
    """Calls that are repeated until the coordinator answers or the agent is asked to stop."""

    def __init__(
        self,
        http: httpx.Client,
        stopping: threading.Event,
        on_problem: Callable[[str], None] = lambda _problem: None,
        token: Callable[[], str] = lambda: "",
    ) -> None:
        """Call `on_problem` with the reason when a call fails, and with an empty string once one succeeds.

        `token` returns the token that `http` sends; a token that is replaced during a call does not end the agent.
        """
        self._http, self._stopping, self._on_problem, self._token = http, stopping, on_problem, token
        self.reachable: bool | None = None
        self.problem = ""  # why the last call was not answered
        self.bytes_sent = self.bytes_received = 0
        self._protocol = versions.UNVERSIONED  # as of the coordinator's last response

    def _retry(self, what: str, attempt: Callable[[], Outcome[Value]], tries: int | None = None) -> Value:
        """Repeat an attempt until it is done; raise its error if a retry would not help."""
        backoff = Backoff(self._stopping, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            if self._stopping.is_set():
                raise StopRequested
            token = self._token()
            try:
                outcome = attempt()
            except httpx.HTTPError as error:
                outcome = Retry(str(explain(error)))
            except ForeignAnswer as error:  # from something on the network path; the coordinator may be back soon
                outcome = Retry(str(error))
            except RequestRefused as error:
                if error.code == "invalid-token" and self._token() != token:
                    continue
                if ended := _ended(error, token):
                    raise ended from error
                raise
            if isinstance(outcome, Done):
                self._note(True, "")
                return outcome.value
            if self._stopping.is_set():  # the connection may have been closed for that
                raise StopRequested
            self._note(False, outcome.reason)
            if tries is not None and (tries := tries - 1) <= 0:
                raise DistransError(f"{what}: {outcome.reason}")
            pause_s = backoff.next_pause_s(outcome.retry_after)
            logger.warning("%s: %s; trying again in %.0f s", what, outcome.reason.rstrip("."), pause_s)
            backoff.wait(pause_s)

    def _note(self, reachable: bool, problem: str) -> None:
        self.reachable, self.problem = reachable, problem
        self._on_problem(problem)

    def _request(self, method: str, url: str | httpx.URL, **options: Any) -> httpx.Response:
        response = request(self._http, method, str(url), **options)
        self._protocol = versions.read_version(response.headers.get(versions.HEADER)) or versions.UNVERSIONED
        return response

    def me(self) -> ClientView:
        """Return the coordinator's record of this client."""
        return self._retry("asking for the client record", lambda: parsed(ClientView, self._request("GET", "/v1/me")))

    def update_counts(self, counts: dict[str, int], held_out_images: int) -> None:
        """Report changed class counts."""
        change = {"class_counts": counts, "held_out_images": held_out_images}
        self._retry("sending class counts", lambda: accepted(self._request("PATCH", "/v1/me", json=change)))

    def task(self, after: str) -> TaskAnswer:
        """Return what to do now. Waits for a task newer than `after`, unless the coordinator was just unreachable."""

        def ask() -> Outcome[TaskAnswer]:
            wait_s = 0.0 if self.reachable is False else LONG_POLL_S
            return parsed(TaskAnswer, self._request("GET", "/v1/task", params={"wait": wait_s, "after": after}))

        return self._retry("asking for work", ask)

    def download(self, url: str, target: Path, expected: ExpectedDownload) -> bytes:
        """Download a body with the expected content; resume what a broken transfer left in `target`.

        Raises ForeignUrl if it is on another host, UnusableModel if it is too large or wrong every time.
        """
        address = require_same_origin(self._http, url)
        expected.check_size()
        part, backoff = PartialFile(target, expected), Backoff(self._stopping, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        for left in reversed(range(_DOWNLOAD_TRIES)):
            try:
                self._retry("downloading", lambda: self._fetch(address, part))
                return part.take()
            except WireError as error:
                part.remove()
                if not left:
                    raise UnusableModel(
                        f"{url} had the wrong content {_DOWNLOAD_TRIES} times in a row: {error.message}"
                    ) from error
                pause_s = backoff.next_pause_s()
                logger.warning("downloading %s: %s; trying again in %.0f s", url, error.message, pause_s)
                backoff.wait(pause_s)
        raise AssertionError("unreachable")

    def _fetch(self, url: httpx.URL, part: PartialFile) -> Outcome[None]:
        headers = {"Accept-Encoding": "identity"} | part.resume_headers()
        with self._http.stream("GET", url, headers=headers) as response:
            if response.status_code == 416 and part.exists:  # the partial file is already complete
                return Done(None)
            if response.status_code not in (200, 206):
                return failed(response, read_bounded(response))
            with part.open(response) as write:
                for piece in response.iter_raw(PIECE_BYTES):
                    write(piece)
                    self.bytes_received += len(piece)
                    if self._stopping.is_set():
                        raise StopRequested
        return Done(None)

    def check_upload(self, url: str) -> None:
        """Raise ForeignUrl if an update may not be sent to this URL."""
        require_same_origin(self._http, url)

    def upload(self, url: str, body: bytes, sha256: str) -> UpdateReceipt:
        """Send an update. Idempotent; raises RequestRefused when the round is over, ForeignUrl for another host."""
        address = require_same_origin(self._http, url)
        if len(body) > RESUMABLE_BYTES:
            return self._retry("uploading", lambda: self._resume_upload(address, body, sha256))
        headers = {"Content-Digest": digest_header(sha256)}
        receipt = self._retry(
            "uploading", lambda: parsed(UpdateReceipt, self._request("PUT", address, content=body, headers=headers))
        )
        self.bytes_sent += len(body)
        return receipt

    def _resume_upload(self, url: httpx.URL, body: bytes, sha256: str) -> Outcome[UpdateReceipt]:
        status = self._request("HEAD", url)
        if not status.is_success:
            return _failed_head(status)
        offset = _offset(status, len(body))
        headers = {
            "Upload-Offset": str(offset),
            "Upload-Length": str(len(body)),
            "Repr-Digest": digest_header(sha256),
            "Content-Length": str(len(body) - offset),  # else it would be chunked, which takes the coordinator longer
        }
        response = self._request("PATCH", url, content=self._pieces(body, offset), headers=headers)
        if response.status_code == 409 and response.headers.get("upload-offset") is not None:
            return Retry("the coordinator expected another part of the upload", response.headers.get("retry-after", ""))
        return parsed(UpdateReceipt, response)

    def _pieces(self, body: bytes, offset: int) -> Iterator[bytes]:
        for start in range(offset, len(body), PIECE_BYTES):
            if self._stopping.is_set():
                raise StopRequested
            piece = body[start : start + PIECE_BYTES]
            self.bytes_sent += len(piece)
            yield piece

    def report_evaluation(self, model: int, result: EvaluationReport) -> None:
        """Report what a global model scored here; raise DistransError if the report cannot be delivered."""
        # Coordinators without a version check no agent's and reject fields they do not know.
        unknown = None if self._protocol >= versions.VERDICTS_SINCE else {"paired", "candidate"}
        url, body = f"/v1/models/{model}/evaluation", result.model_dump(exclude=unknown, exclude_none=True)
        self._retry("reporting a score", lambda: accepted(self._request("PUT", url, json=body)), tries=_SCORE_TRIES)


def _ended(error: RequestRefused, token: str) -> AgentEnded | None:
    """Return the end of the agent's part, if that is what a refusal means."""
    message = f"The coordinator has ended this agent's access: {error.message}"
    if error.code == "invalid-token":
        return TokenRefused(token, message)
    return AgentEnded(ENDINGS[error.code][0], message, ENDINGS[error.code][1]) if error.code in ENDINGS else None


def _failed_head(status: httpx.Response) -> Retry:
    if found := retry_for(status):
        return found
    code, detail = _HEAD_CODES.get(status.status_code, "unknown"), f"The coordinator answered {status.status_code}."
    raise RequestRefused(status.status_code, code, detail)


def _offset(status: httpx.Response, length: int) -> int:
    """Return how much of an upload the coordinator has."""
    if status.headers.get("upload-complete") == "?1":
        return length
    text = status.headers.get("upload-offset", "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= length):
        raise ForeignAnswer(status.status_code)
    return int(text)
