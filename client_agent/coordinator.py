"""The coordinator as the agent sees it: calls that go on through network errors, restarts and slow links."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from client_agent.backoff import Backoff
from client_agent.downloads import Expected, PartialFile
from client_agent.errors import (
    AgentEnded,
    Ending,
    OtherProtocol,
    Refused,
    Stopped,
    TokenRefused,
    UnusableModel,
)
from client_agent.network import LONG_POLL_S, on_own_origin
from shared import versions
from shared.evaluation import Evaluation
from shared.http.outgoing import explain, read_bounded, request
from shared.plan import StoredPlan
from shared.problems import DistransError, ForeignAnswer, WireError
from shared.schemas import (
    ClientView,
    FederationPlanAnswer,
    JoinAnswer,
    JoinRequest,
    Problem,
    TaskAnswer,
    TokenAnswer,
    UpdateReceipt,
)
from shared.wire import digest_header

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")
logger = logging.getLogger(__name__)
RESUMABLE_BYTES = 8 * 1024 * 1024  # larger uploads go in the resumable form
_PIECE_BYTES = 1024 * 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_DOWNLOAD_TRIES = 4  # of a body that is not what it should be
_SCORE_TRIES = 5  # the federation goes on without a score
ENDINGS = {
    "client-revoked": (Ending.REVOKED, "Ask its operator if that was not intended."),
    "client-left": (Ending.LEFT, None),
}


def unreadable(response: httpx.Response) -> OtherProtocol | ForeignAnswer:
    """Why an answer is not what it should be: a coordinator of another release gave it, or none did."""
    spoken = versions.read_version(response.headers.get(versions.HEADER))
    if spoken is None or versions.HEADER not in response.headers or spoken == versions.PROTOCOL:
        return ForeignAnswer(response.status_code)
    return OtherProtocol(spoken)


def refusal(response: httpx.Response) -> Refused | OtherProtocol | ForeignAnswer:
    """The coordinator's problem as an exception."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return unreadable(response)
    return Refused(response.status_code, problem.code, problem.detail, problem.next_step)


def once(call: Callable[[], httpx.Response], read: Callable[[httpx.Response], Result]) -> Result:
    """One call at the command line, where a person can try again: errors are raised at once."""
    try:
        response = call()
    except httpx.HTTPError as error:
        found = explain(error)
        raise DistransError(f"The coordinator cannot be reached: {found.cause}.", next_step=found.next_step) from error
    if not response.is_success:
        raise refusal(response)
    return read(response)


@dataclass(frozen=True)
class Preview:
    """What an invite leads to."""

    plan: StoredPlan
    takes_attempts: bool  # coordinators before the protocol's header reject a join that carries one


def preview(http: httpx.Client, attempt: str | None = None) -> Preview:
    """The plan behind an invite, whose token the client carries; one that was used needs the attempt that used it."""

    def read(response: httpx.Response) -> Preview:
        return Preview(_parse(FederationPlanAnswer, response).plan, versions.HEADER in response.headers)

    params = {} if attempt is None else {"attempt": attempt}
    return once(lambda: request(http, "GET", "/v1/join", params=params), read)


def join(http: httpx.Client, body: JoinRequest) -> JoinAnswer:
    """Enrol."""
    content = body.model_dump(exclude_none=True)
    return once(lambda: request(http, "POST", "/v1/join", json=content), partial(_parse, JoinAnswer))


def own_record(http: httpx.Client) -> ClientView:
    """The client behind the token that `http` carries."""
    return once(lambda: request(http, "GET", "/v1/me"), partial(_parse, ClientView))


def renew_token(http: httpx.Client) -> TokenAnswer:
    """A new token; the old one is valid until the new one is used."""
    return once(lambda: request(http, "POST", "/v1/me/token"), partial(_parse, TokenAnswer))


def leave(http: httpx.Client) -> None:
    """Leave the federation."""
    once(lambda: request(http, "DELETE", "/v1/me"), _any_success)


class Coordinator:
    """Calls that are repeated until they are answered, or until the agent is asked to stop."""

    def __init__(
        self,
        http: httpx.Client,
        stopping: threading.Event,
        on_problem: Callable[[str], None] = lambda _problem: None,
        token: Callable[[], str] = lambda: "",
    ) -> None:
        """`on_problem` is told why a call was not answered, and an empty text once one was.

        `token` is what `http` sends at the moment; one that is replaced during a call is no reason to end.
        """
        self._http, self._stopping, self._on_problem, self._token = http, stopping, on_problem, token
        self.reachable: bool | None = None
        self.problem = ""  # why the last call was not answered
        self.bytes_sent = self.bytes_received = 0

    def _repeat(
        self,
        what: str,
        call: Callable[[], httpx.Response],
        read: Callable[[httpx.Response], Result],
        tries: int | None = None,
    ) -> Result:
        backoff = Backoff(self._stopping, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            if self._stopping.is_set():
                raise Stopped
            retry_after, token = "", self._token()
            try:
                response = call()
                if response.is_success:
                    result = read(response)
                    self._note(True, "")
                    return result
                if response.status_code < 500 and response.status_code not in (408, 429):
                    raise refusal(response)
                problem = f"the coordinator answered {response.status_code}"
                retry_after = response.headers.get("retry-after", "")
            except httpx.HTTPError as error:
                problem = str(explain(error))
            except ForeignAnswer as error:  # of something on the way; the coordinator may be back behind it
                problem = str(error)
            except Refused as error:
                message = f"The coordinator has ended this agent's access: {error.message}"
                if error.code == "invalid-token":
                    if self._token() != token:
                        continue
                    raise TokenRefused(token, message) from error
                if error.code in ENDINGS:
                    ending, next_step = ENDINGS[error.code]
                    raise AgentEnded(ending, message, next_step) from error
                raise
            if self._stopping.is_set():  # and the connection was closed for that
                raise Stopped
            self._note(False, problem)
            if tries is not None and (tries := tries - 1) <= 0:
                raise DistransError(f"{what}: {problem}")
            pause_s = backoff.choose_s(retry_after)
            logger.warning("%s: %s; trying again in %.0f s", what, problem.rstrip("."), pause_s)
            backoff.wait(pause_s)

    def _note(self, reachable: bool, problem: str) -> None:
        self.reachable, self.problem = reachable, problem
        self._on_problem(problem)

    def _call(self, method: str, url: str, **options: Any) -> Callable[[], httpx.Response]:
        return lambda: request(self._http, method, url, **options)

    def me(self) -> ClientView:
        """The coordinator's record of this client."""
        return self._repeat("asking for my record", self._call("GET", "/v1/me"), partial(_parse, ClientView))

    def update_counts(self, counts: dict[str, int], held_out_images: int) -> None:
        """Report that the data have changed."""
        change = {"class_counts": counts, "held_out_images": held_out_images}
        self._repeat("sending class counts", self._call("PATCH", "/v1/me", json=change), _any_success)

    def task(self, after: str) -> TaskAnswer:
        """What to do now; waits for news after the ticket, except right after an outage, to know that it is over."""

        def ask() -> httpx.Response:
            wait_s = 0.0 if self.reachable is False else LONG_POLL_S
            return request(self._http, "GET", "/v1/task", params={"wait": wait_s, "after": after})

        return self._repeat("asking for work", ask, partial(_parse, TaskAnswer))

    def download(self, url: str, target: Path, expected: Expected) -> bytes:
        """A body that is what it should be; what a broken transfer left in `target` is resumed.

        Raises UnusableModel when it is on another host, too large, or wrong again and again.
        """
        address = on_own_origin(self._http, url)
        expected.check_size()
        part, backoff = PartialFile(target, expected), Backoff(self._stopping, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        for left in reversed(range(_DOWNLOAD_TRIES)):
            try:
                self._repeat("downloading", lambda: self._fetch(address, part), _any_success)
                return part.take()
            except WireError as error:
                part.remove()
                if not left:
                    raise UnusableModel(
                        f"{url} is not what it should be, after {_DOWNLOAD_TRIES} attempts: {error.message}"
                    ) from error
                pause_s = backoff.choose_s()
                logger.warning("downloading %s: %s; trying again in %.0f s", url, error.message, pause_s)
                backoff.wait(pause_s)
        raise AssertionError("unreachable")

    def _fetch(self, url: httpx.URL, part: PartialFile) -> httpx.Response:
        headers = {"Accept-Encoding": "identity"} | part.resume_headers()
        with self._http.stream("GET", url, headers=headers) as response:
            if response.status_code == 416 and part.exists:  # it is whole already
                return httpx.Response(206)
            if response.status_code not in (200, 206):
                return httpx.Response(
                    response.status_code, headers=_retry_after(response), content=read_bounded(response)
                )
            with part.open(response) as write:
                for piece in response.iter_raw(_PIECE_BYTES):
                    write(piece)
                    self.bytes_received += len(piece)
                    if self._stopping.is_set():
                        raise Stopped
            return httpx.Response(response.status_code)

    def upload(self, round_id: int, body: bytes, sha256: str) -> UpdateReceipt:
        """Send an update; the same one again is answered in the same way. Raises Refused when the round is over."""
        url = f"/v1/rounds/{round_id}/update"
        if len(body) <= RESUMABLE_BYTES:
            headers = {"Content-Digest": digest_header(sha256)}
            receipt = self._repeat("uploading", self._call("PUT", url, content=body, headers=headers), _receipt)
            self.bytes_sent += len(body)
            return receipt
        return self._repeat("uploading", lambda: self._send_rest(url, body, sha256), _receipt)

    def _send_rest(self, url: str, body: bytes, sha256: str) -> httpx.Response:
        status = request(self._http, "HEAD", url)
        if not status.is_success:
            return _explained(status)
        offset = _offset(status, len(body))
        headers = {
            "Upload-Offset": str(offset),
            "Upload-Length": str(len(body)),
            "Repr-Digest": digest_header(sha256),
        }
        response = request(self._http, "PATCH", url, content=self._pieces(body, offset), headers=headers)
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
        """Report what a global model scored here; DistransError when it cannot be delivered."""
        call = self._call("PUT", f"/v1/models/{model}/evaluation", json=result.model_dump())
        self._repeat("reporting a score", call, _any_success, tries=_SCORE_TRIES)


def _offset(status: httpx.Response, length: int) -> int:
    """How much of an upload the coordinator has."""
    if status.headers.get("upload-complete") == "?1":
        return length
    text = status.headers.get("upload-offset", "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= length):
        raise ForeignAnswer(status.status_code)
    return int(text)


def _explained(status: httpx.Response) -> httpx.Response:
    """HEAD answers carry no body: give the refusal one."""
    codes = {401: "invalid-token", 403: "not-a-participant", 404: "no-such-round", 410: "round-closed"}
    code = codes.get(status.status_code, "unknown")
    detail = f"The coordinator answered {status.status_code}."
    problem = Problem(title=status.reason_phrase, status=status.status_code, code=code, detail=detail)
    return httpx.Response(status.status_code, content=problem.model_dump_json(), headers=_retry_after(status))


def _retry_after(response: httpx.Response) -> dict[str, str]:
    return {"retry-after": response.headers.get("retry-after", "")}


def _parse(kind: type[Model], response: httpx.Response) -> Model:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise unreadable(response) from error


def _receipt(response: httpx.Response) -> UpdateReceipt:
    return _parse(UpdateReceipt, response)


def _any_success(response: httpx.Response) -> None:
    """A success is all that matters."""
