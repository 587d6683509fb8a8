"""The coordinator as the agent sees it: calls that go on through network errors, restarts and slow links."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from client_agent.errors import AgentEnded, ForeignAnswer, Refused, Stopped
from client_agent.network import LONG_POLL_S, explain
from shared.evaluation import Evaluation
from shared.problems import DistransError
from shared.schemas import ClientView, FederationPlanAnswer, JoinAnswer, JoinRequest, Problem, TaskAnswer, UpdateReceipt
from shared.wire import digest, digest_header

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")
logger = logging.getLogger(__name__)
RESUMABLE_BYTES = 8 * 1024 * 1024  # larger uploads go in the resumable form
_PIECE_BYTES = 1024 * 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_ENDING_CODES = {"client-revoked", "client-left", "invalid-token"}


def refusal(response: httpx.Response) -> Refused | ForeignAnswer:
    """The coordinator's problem as an exception."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return ForeignAnswer(response.status_code)
    return Refused(response.status_code, problem.code, problem.detail, problem.next_step)


def once(kind: type[Model], call: Callable[[], httpx.Response]) -> Model:
    """One call at the command line, where a person can try again: errors are raised at once."""
    try:
        response = call()
    except httpx.HTTPError as error:
        trouble = explain(error)
        raise DistransError(
            f"The coordinator cannot be reached: {trouble.cause}.", next_step=trouble.next_step
        ) from error
    if not response.is_success:
        raise refusal(response)
    return _parse(kind, response)


def preview(http: httpx.Client) -> FederationPlanAnswer:
    """The plan behind an invite, whose token the client carries."""
    return once(FederationPlanAnswer, lambda: http.get("/v1/join"))


def join(http: httpx.Client, request: JoinRequest) -> JoinAnswer:
    """Enrol."""
    return once(JoinAnswer, lambda: http.post("/v1/join", json=request.model_dump()))


class Coordinator:
    """Calls that are repeated until they are answered, or until the agent is asked to stop."""

    def __init__(self, http: httpx.Client, stopping: threading.Event) -> None:
        self._http, self._stopping = http, stopping
        self.reachable: bool | None = None
        self.bytes_sent = self.bytes_received = 0

    def _repeat(
        self, what: str, call: Callable[[], httpx.Response], read: Callable[[httpx.Response], Result]
    ) -> Result:
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._stopping.is_set():
                raise Stopped
            wait_s: float | None = None
            try:
                response = call()
                if response.is_success:
                    result = read(response)
                    self.reachable = True
                    return result
                if response.status_code < 500 and response.status_code not in (408, 429):
                    raise refusal(response)
                problem = f"the coordinator answered {response.status_code}"
                after = response.headers.get("retry-after", "")
                wait_s = min(max(float(after), 1.0), 3600.0) if after.isdigit() else None
            except httpx.HTTPError as error:
                problem = str(explain(error))
            except ForeignAnswer as error:  # of something on the way; the coordinator may be back behind it
                problem = str(error)
            except Refused as error:
                if error.code in _ENDING_CODES:
                    raise AgentEnded(f"The coordinator has ended this agent's access: {error.message}") from error
                raise
            if self._stopping.is_set():  # and the connection was closed for that
                raise Stopped
            self.reachable = False
            chosen_s = wait_s if wait_s is not None else pause_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
            logger.warning("%s: %s; trying again in %.0f s", what, problem.rstrip("."), chosen_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            if self._stopping.wait(chosen_s):
                raise Stopped

    def me(self) -> ClientView:
        """The coordinator's record of this client."""
        return self._repeat("asking for my record", lambda: self._http.get("/v1/me"), partial(_parse, ClientView))

    def update_counts(self, counts: dict[str, int], held_out_images: int) -> None:
        """Tell that the data have changed."""
        change = {"class_counts": counts, "held_out_images": held_out_images}
        self._repeat("sending class counts", lambda: self._http.patch("/v1/me", json=change), _whatever)

    def task(self, after: str) -> TaskAnswer:
        """What to do now; waits for news after the ticket."""
        params: dict[str, str | float] = {"wait": LONG_POLL_S, "after": after}
        return self._repeat(
            "asking for work", lambda: self._http.get("/v1/task", params=params), partial(_parse, TaskAnswer)
        )

    def download(self, url: str, target: Path, sha256: str | None = None) -> bytes:
        """A body; what a broken transfer left is kept in `target` and gone on from."""
        etag_file = target.with_name(target.name + ".etag")
        while True:
            self._repeat("downloading", lambda: self._fetch(url, target, etag_file), _whatever)
            data, etag = target.read_bytes(), etag_file.read_text().strip('"')
            target.unlink()
            etag_file.unlink()
            if digest(data) == (sha256 or etag):
                return data
            logger.warning("a download of %s did not match its digest; fetching it again", url)
            if self._stopping.wait(_FIRST_PAUSE_S):
                raise Stopped

    def _fetch(self, url: str, target: Path, etag_file: Path) -> httpx.Response:
        have = target.stat().st_size if target.exists() and etag_file.exists() else 0
        headers = {"Range": f"bytes={have}-", "If-Range": etag_file.read_text()} if have else {}
        with self._http.stream("GET", url, headers=headers) as response:
            if not response.is_success:
                response.read()
                if response.status_code == 416:  # it is whole already
                    response.status_code = 206
                return response
            if response.status_code == 200:
                if "etag" not in response.headers:
                    raise ForeignAnswer(response.status_code)
                target.unlink(missing_ok=True)
                etag_file.write_text(response.headers["etag"])
            with target.open("ab") as handle:
                for piece in response.iter_bytes(_PIECE_BYTES):
                    handle.write(piece)
                    self.bytes_received += len(piece)
                    if self._stopping.is_set():
                        raise Stopped
            return response

    def upload(self, round_id: int, body: bytes, sha256: str) -> UpdateReceipt:
        """Send an update; the same one again is answered in the same way. Raises Refused when the round is over."""
        url = f"/v1/rounds/{round_id}/update"
        if len(body) <= RESUMABLE_BYTES:
            headers = {"Content-Digest": digest_header(sha256)}
            receipt = self._repeat("uploading", lambda: self._http.put(url, content=body, headers=headers), _receipt)
            self.bytes_sent += len(body)
            return receipt
        return self._repeat("uploading", lambda: self._send_rest(url, body, sha256), _receipt)

    def _send_rest(self, url: str, body: bytes, sha256: str) -> httpx.Response:
        status = self._http.head(url)
        if not status.is_success:
            return _explained(status)
        if not status.headers.get("upload-offset", "").isdigit():
            raise ForeignAnswer(status.status_code)
        offset = int(status.headers["upload-offset"])
        if status.headers.get("upload-complete") == "?1":
            offset = len(body)
        headers = {
            "Upload-Offset": str(offset),
            "Upload-Length": str(len(body)),
            "Repr-Digest": digest_header(sha256),
        }
        response = self._http.patch(url, content=self._pieces(body, offset), headers=headers)
        if response.status_code == 409 and response.headers.get("upload-offset") is not None:
            response.status_code = 503  # another offset is expected: ask again and go on from there
        return response

    def _pieces(self, body: bytes, offset: int) -> Iterator[bytes]:
        for start in range(offset, len(body), _PIECE_BYTES):
            if self._stopping.is_set():
                raise Stopped
            piece = body[start : start + _PIECE_BYTES]
            self.bytes_sent += len(piece)
            yield piece

    def evaluation(self, model: int, result: Evaluation) -> None:
        """Report what a global model scored here."""
        url = f"/v1/models/{model}/evaluation"
        self._repeat("reporting a score", lambda: self._http.put(url, json=result.model_dump()), _whatever)


def _explained(status: httpx.Response) -> httpx.Response:
    """HEAD answers carry no body: give the refusal one."""
    codes = {401: "invalid-token", 403: "not-a-participant", 404: "no-such-round", 410: "round-closed"}
    code = codes.get(status.status_code, "unknown")
    detail = f"The coordinator answered {status.status_code}."
    problem = Problem(title=status.reason_phrase, status=status.status_code, code=code, detail=detail)
    headers = {"retry-after": status.headers.get("retry-after", "")}
    return httpx.Response(status.status_code, content=problem.model_dump_json(), headers=headers)


def _parse(kind: type[Model], response: httpx.Response) -> Model:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise ForeignAnswer(response.status_code) from error


def _receipt(response: httpx.Response) -> UpdateReceipt:
    return _parse(UpdateReceipt, response)


def _whatever(response: httpx.Response) -> None:
    """A success is all that matters."""
