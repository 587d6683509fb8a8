"""Tells the coordinator what the agent is doing and what troubles it, from a thread of its own.

Nothing depends on a report: one that fails is replaced by the next one, and training neither waits for it nor fails
with it. While training the reports are this site's only sign of life.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx

from client_agent.backoff import Backoff
from client_agent.condition import Activity, Condition, Phase
from client_agent.coordinator import ENDINGS, refusal
from client_agent.errors import Refused, Stopped
from shared.http.outgoing import request
from shared.problems import DistransError
from shared.schemas import AgentActivity, StatusReport, TroubleReport

logger = logging.getLogger(__name__)
HEARTBEAT_S = 45.0  # the contract says at least once a minute
_CALM_S = 1.0  # steps of a small round take milliseconds: not each of them is worth a request
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_UNKNOWN_AGAIN_S = (
    600.0  # an older coordinator may be upgraded; a proxy also answers 404 while the coordinator restarts
)
_TIMEOUT = httpx.Timeout(10.0)
_FAREWELL_S = 2.0
_ACTIVITIES: dict[Phase, AgentActivity] = {
    Phase.STARTING: "starting",
    Phase.WAITING: "waiting",
    Phase.DOWNLOADING: "downloading",
    Phase.MEASURING: "measuring",
    Phase.TRAINING: "training",
    Phase.TRAINING_BASELINE: "training",
    Phase.UPLOADING: "uploading",
    Phase.PAUSING: "waiting",
    Phase.ENDED: "ended",
}


def describe(condition: Condition, activity: Activity | None = None) -> StatusReport:
    """Return the condition as the coordinator may know it."""
    shown = activity or condition.activity
    troubles = [
        TroubleReport(kind=trouble.kind.value, message=trouble.told[:300]) for trouble in condition.report.troubles[:8]
    ]
    return StatusReport(activity=_ACTIVITIES[shown.phase], detail=str(shown)[:200], troubles=troubles)


class Reporter:
    """Sends a report after every change, and one now and then without any."""

    def __init__(
        self, condition: Condition, connect: Callable[[], httpx.Client], heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        """`connect` opens a connection with the token that is on the disk."""
        self._condition, self._connect, self._heartbeat_s = condition, connect, heartbeat_s
        self._over = threading.Event()
        self._http: httpx.Client | None = None
        self._has_arrived = False  # the last report
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Send a last report if the coordinator is there, and end; takes at most a few seconds."""
        self._over.set()
        self._condition.changed.set()
        self._thread.join(timeout=2 * _FAREWELL_S)

    def _run(self) -> None:
        try:
            with suppress(Stopped):
                self._report_changes()
            if self._over.is_set() and self._has_arrived:
                self._send(describe(self._condition, Activity(Phase.ENDED)), httpx.Timeout(_FAREWELL_S))
        except Exception:  # whatever it is, training and predictions go on
            logger.warning("the coordinator is no longer told what this agent does", exc_info=True)
        finally:
            if self._http is not None:
                self._http.close()

    def _report_changes(self) -> None:
        backoff = Backoff(self._over, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._over.is_set():
            self._condition.changed.clear()
            report = describe(self._condition)
            answer = self._send(report)
            self._has_arrived = answer is not None and answer.is_success
            if self._has_arrived:
                backoff.reset()
                self._over.wait(_CALM_S)
                self._await_change(report)
            elif answer is not None and _is_final(answer):
                return
            elif answer is not None and answer.status_code in (404, 405):
                logger.debug("the coordinator takes no status reports: it may be of an older release")
                self._over.wait(_UNKNOWN_AGAIN_S)
            else:
                backoff.wait(backoff.choose_s(answer.headers.get("retry-after", "") if answer is not None else ""))

    def _await_change(self, sent: StatusReport) -> None:
        """Return when there is something new to say, or a sign of life is due."""
        due_at = time.monotonic() + self._heartbeat_s
        while self._condition.changed.wait(due_at - time.monotonic()) and not self._over.is_set():
            self._condition.changed.clear()
            if describe(self._condition) != sent:
                return

    def _send(self, report: StatusReport, timeout: httpx.Timeout = _TIMEOUT) -> httpx.Response | None:
        """Return the answer; None when there was none."""
        try:
            if self._http is None:
                self._http = self._connect()
            answer = request(self._http, "PUT", "/v1/me/status", json=report.model_dump(), timeout=timeout)
        except (httpx.HTTPError, DistransError) as error:
            logger.debug("a status report was not delivered: %s", error)
            return None
        if answer.status_code == 401:  # the token may have been replaced on the disk
            self._http.close()
            self._http = None
        return answer


def _is_final(answer: httpx.Response) -> bool:
    """Whether no later report would be taken either; a proxy's 403 says nothing about that."""
    if answer.status_code != 403:
        return False
    found = refusal(answer)
    return isinstance(found, Refused) and found.code in ENDINGS


@contextmanager
def reporting(condition: Condition, connect: Callable[[], httpx.Client]) -> Iterator[None]:
    """Report until the end of the block."""
    reporter = Reporter(condition, connect)
    reporter.start()
    try:
        yield
    finally:
        reporter.stop()
