"""Reports the agent's activity and troubles to the coordinator, in a separate thread.

Nothing depends on a report: a failed one is superseded by the next, and training neither waits for it nor fails with
it. During training, reports are the site's only sign of life.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx

from client_agent.coordinator.backoff import Backoff
from client_agent.coordinator.client import ENDINGS
from client_agent.coordinator.outcomes import error_from_response
from client_agent.errors import RequestRefused, StopRequested
from client_agent.status import Activity, AgentStatus, Phase
from shared.contract.errors import DistransError
from shared.contract.messages import AgentActivity, StatusReport, TroubleReport
from shared.http.client import request

logger = logging.getLogger(__name__)
HEARTBEAT_S = 45.0  # the contract asks for at least one per minute
_MIN_INTERVAL_S = 1.0  # the steps of a small round take milliseconds; not every one is worth a request
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0
# Until a coordinator that answered 404 is asked again: an older one may be upgraded, and a proxy answers 404 while a
# coordinator restarts.
_UNKNOWN_RETRY_S = 600.0
_TIMEOUT = httpx.Timeout(10.0)
_FAREWELL_S = 2.0
_ACTIVITIES: dict[Phase, AgentActivity] = {
    Phase.STARTING: "starting",
    Phase.WAITING: "waiting",
    Phase.DOWNLOADING: "downloading",
    Phase.MEASURING: "measuring",
    Phase.TRAINING: "training",
    Phase.TRAINING_ALONE: "training",
    Phase.ADAPTING: "training",
    Phase.UPLOADING: "uploading",
    Phase.PAUSING: "waiting",
    Phase.ENDED: "ended",
}


def build_report(status: AgentStatus, activity: Activity | None = None) -> StatusReport:
    """Return the report for the coordinator, without the private parts of troubles."""
    shown = activity or status.activity
    troubles = [
        TroubleReport(kind=trouble.kind.value, message=trouble.told[:300]) for trouble in status.report.troubles[:8]
    ]
    return StatusReport(activity=_ACTIVITIES[shown.phase], detail=str(shown)[:200], troubles=troubles)


class Reporter:
    """A thread that reports every change, with heartbeats in between."""

    def __init__(self, status: AgentStatus, connect: Callable[[], httpx.Client]) -> None:
        self._status, self._connect = status, connect
        self._over = threading.Event()
        self._http: httpx.Client | None = None
        self._is_answered = False  # the last report
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send a last report and end; wait at most _FAREWELL_S, in case the coordinator hangs."""
        self._over.set()
        self._status.changed.set()
        self._thread.join(timeout=_FAREWELL_S)

    def _run(self) -> None:
        try:
            with suppress(StopRequested):
                self._report_changes()
            if self._over.is_set() and self._is_answered:
                self._send(build_report(self._status, Activity(Phase.ENDED)), httpx.Timeout(_FAREWELL_S))
        except Exception:  # must not affect training and predictions
            logger.warning("status reports to the coordinator have stopped", exc_info=True)
        finally:
            if self._http is not None:
                self._http.close()

    def _report_changes(self) -> None:
        backoff = Backoff(self._over, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._over.is_set():
            self._status.changed.clear()
            report = build_report(self._status)
            answer = self._send(report)
            self._is_answered = answer is not None and answer.is_success
            if self._is_answered:
                backoff.reset()
                self._over.wait(_MIN_INTERVAL_S)
                self._await_change(report)
            elif answer is not None and _is_final(answer):
                return
            elif answer is not None and answer.status_code in (404, 405):
                logger.debug("the coordinator does not accept status reports; it may be an older release")
                self._over.wait(_UNKNOWN_RETRY_S)
            else:
                backoff.wait(backoff.next_pause_s(answer.headers.get("retry-after", "") if answer is not None else ""))

    def _await_change(self, sent: StatusReport) -> None:
        """Return when there is something new to report, or a heartbeat is due."""
        due_at = time.monotonic() + HEARTBEAT_S
        while self._status.changed.wait(due_at - time.monotonic()) and not self._over.is_set():
            self._status.changed.clear()
            if build_report(self._status) != sent:
                return

    def _send(self, report: StatusReport, timeout: httpx.Timeout = _TIMEOUT) -> httpx.Response | None:
        """Return the response; None if there was none."""
        try:
            if self._http is None:
                self._http = self._connect()
            return request(self._http, "PUT", "/v1/me/status", json=report.model_dump(), timeout=timeout)
        except (httpx.HTTPError, DistransError) as error:
            logger.debug("could not deliver a status report: %s", error)
            return None


def _is_final(answer: httpx.Response) -> bool:
    """Return whether later reports would be refused too; a 403 from a proxy says nothing about that."""
    if answer.status_code != 403:
        return False
    found = error_from_response(answer, answer.content)
    return isinstance(found, RequestRefused) and found.code in ENDINGS


@contextmanager
def reporting(status: AgentStatus, connect: Callable[[], httpx.Client]) -> Iterator[None]:
    """Report in the background until the end of the block."""
    reporter = Reporter(status, connect)
    reporter.start()
    try:
        yield
    finally:
        reporter.stop()
