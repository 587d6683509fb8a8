"""The agent's loop: poll, download, measure, swap, train, upload; and the site's own models while there is time.

Failures that may pass are recorded as troubles and retried after a pause. The others (revoked, left, cancelled, invalid
token) end the loop with AgentEnded. Predictions are served independently of the loop.
"""

import logging
import time

from client_agent.context import AgentContext
from client_agent.coordinator.backoff import Backoff
from client_agent.coordinator.client import Coordinator
from client_agent.coordinator.models import ModelFetcher
from client_agent.coordinator.task_poll import TaskPoll
from client_agent.data.dataset import SiteData
from client_agent.errors import (
    AgentEnded,
    DataError,
    Ending,
    ForeignUrl,
    RequestRefused,
    StateError,
    StopRequested,
    describe_error,
)
from client_agent.own_training import OwnTraining
from client_agent.scores import ScoreReporter
from client_agent.state.folder import PendingUpload
from client_agent.state.kept_models import Bundle
from client_agent.status import Phase, TroubleKind
from client_agent.training import Trainer, report_unreadable
from shared.contract.errors import DistransError
from shared.contract.messages import RoundTaskView, TaskAnswer
from shared.learning.methods.base import Update
from shared.tensors.names import Tensors
from shared.tensors.wire import digest

logger = logging.getLogger(__name__)
_NO_TICKET = "none"  # the coordinator answers at once
_FAILURE_PAUSE_S = 10.0  # between polls while the current round or model cannot be used here
_REFUSED_RETRY_S = 60.0  # until a model that the coordinator refused to send is requested again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 120.0
_DATA_RETRY_S = 60.0  # until data that could not be opened, or counts that were rejected, are tried again
_MODEL_RETRY_S = 900.0  # until a model that could not be downloaded or measured is tried again


class Agent:
    """One site's part in a federation."""

    def __init__(self, context: AgentContext) -> None:
        self._context, self._state, self._options = context, context.state, context.options
        self._gate, self._status, self._stopping = context.gate, context.status, context.stopping
        self._trainer, self._fetcher = Trainer(context), ModelFetcher(context.state, context.identity.plan)
        self._own_training, self._scores = OwnTraining(context), ScoreReporter(context)
        self.connection: Coordinator | None = None  # None until it is open
        self._data: SiteData | None = None
        self._data_retry_at = 0.0
        self._has_reported_counts, self._counts_retry_at = False, 0.0
        self._newest: Bundle | None = None  # the last one the gate decided about
        self._measure_retry_at: float | None = None  # when to measure it again, if it could not be measured
        self._unusable: tuple[tuple[int, str], float] | None = None  # not downloadable; when to retry
        self._refused: tuple[int, str] | None = None  # a model that the coordinator refused to send once
        self._given_up: tuple[int, str] | None = None  # a round that cannot be trained here, and its model's digest
        self._trained: tuple[tuple[int, str], Update, Tensors] | None = None  # not on disk yet
        self._ticket = _NO_TICKET
        self._task: TaskAnswer | None = None  # the last one
        self._poll: TaskPoll | None = None  # for the next one, while the agent trains its own models

    # The loop

    def prepare(self) -> None:
        """Connect and open the data; raise the error if either fails."""
        _ = self._coordinator
        if self._options.train and self._data is None:
            self._open_data()

    def _open_data(self) -> None:
        self._data = self._context.open_data()
        self._status.note_data(self._data.report.holdout)

    def run(self) -> None:
        """Run until the agent is stopped or the federation ends; raise AgentEnded when the agent's part is over."""
        self._status.start()
        backoff = Backoff(self._stopping, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        is_over = False
        while not is_over and not self._stopping.is_set():
            try:
                is_over = self._step()
            except (StopRequested, AgentEnded):
                raise
            except Exception as error:
                # Ask anew: a poll under way would answer only when something changes at the coordinator.
                self._ticket, self._poll = _NO_TICKET, None
                pause_s = backoff.next_pause_s()
                self._record(error, pause_s)
                self._status.enter(Phase.PAUSING)
                backoff.wait(pause_s)
            else:
                backoff.reset()
                for kind in (TroubleKind.COORDINATOR, TroubleKind.STORAGE, TroubleKind.UNEXPECTED):
                    self._status.clear(kind)

    def _record(self, error: Exception, pause_s: float) -> None:
        if isinstance(error, RequestRefused):
            self._status.record(TroubleKind.COORDINATOR, f"The coordinator refused a request: {error}")
        elif isinstance(error, (OSError, StateError)):
            self._status.record(TroubleKind.STORAGE, f"The state folder {self._state.path} cannot be used: {error}")
        elif isinstance(error, DistransError):
            self._status.record(TroubleKind.COORDINATOR, str(error))
        else:
            logger.error("unexpected error in the loop; trying again in %.0f s", pause_s, exc_info=error)
            self._status.record(TroubleKind.UNEXPECTED, describe_error(error))

    def _step(self) -> bool:
        """Carry out one task from the coordinator; return True if there will be no other."""
        self._look_for_data()
        if self._newest is None:
            self._newest = self._newest_kept()
        self._deliver_pending_upload()
        task = self._task = self._next_task()
        self._ticket = task.ticket
        if task.action == "cancelled":
            raise AgentEnded(Ending.CANCELLED, f"The federation was cancelled: {task.reason}")
        if task.round is not None and task.model is not None and self._given_up == (task.round.id, task.model.digest):
            # The coordinator does not know and would hand out the round again immediately.
            self._wait_to_try_again()
            return False
        bundle = self._take_model(task)
        cannot_train = task.action == "train" and (bundle is None or self._data is None)
        if cannot_train or (bundle is None and task.model is not None):
            self._wait_to_try_again()  # even if the coordinator announces something new
        elif task.action == "train" and task.round is not None and bundle is not None and self._data is not None:
            self._train(task.round, bundle, self._data)
            self._ticket = _NO_TICKET
        if task.action == "finished" and not self._has_own_work(task):
            self._status.finish(f"The federation has finished: {task.reason}")
            return self._options.exit_when_finished or self._options.serve is None
        return False

    def _next_task(self) -> TaskAnswer:
        """Wait for the next task; meanwhile, work on the site's own models."""
        known, poll = self._task, self._poll
        if known is not None and self._ticket != _NO_TICKET and self._has_own_work(known):
            poll = self._poll = poll or TaskPoll(self._coordinator.task, known)
            self._work_on_own_models(known, poll)
            if not poll.has_news():
                return known  # `finished` is reported once there is nothing left to do
        self._poll = None
        self._status.enter(Phase.WAITING)
        return self._coordinator.task(self._ticket) if poll is None else poll.wait()

    def _wait_to_try_again(self) -> None:
        self._status.enter(Phase.PAUSING)  # otherwise the operator would see the last step, such as a download
        self._stopping.wait(_FAILURE_PAUSE_S)

    @property
    def _coordinator(self) -> Coordinator:
        if self.connection is None:
            self.connection = self._context.connect()
        return self.connection

    # Data

    def _look_for_data(self) -> None:
        if not self._options.train:
            return
        if self._data is None and time.monotonic() >= self._data_retry_at:
            try:
                self._open_data()
            except Exception as error:
                self._data_retry_at = time.monotonic() + _DATA_RETRY_S
                self._status.record(TroubleKind.DATA, describe_error(error))
            else:
                self._status.clear(TroubleKind.DATA)
                self._measure_retry_at = self._measure_retry_at and time.monotonic()
        if self._data is not None:
            self._report_class_counts(self._data)
            is_due = self._measure_retry_at is not None and time.monotonic() >= self._measure_retry_at
            if is_due and self._newest is not None:
                self._measure(self._newest)

    def _report_class_counts(self, data: SiteData) -> None:
        if self._has_reported_counts or time.monotonic() < self._counts_retry_at:
            return
        withheld, held_out = self._context.identity.withhold_class_counts, data.report.test_images
        try:
            known = self._coordinator.me()
            if (known.class_counts, known.held_out_images) != ({} if withheld else data.report.class_counts, held_out):
                logger.info("the image counts have changed; reporting them to the coordinator")
                self._coordinator.update_counts({} if withheld else data.report.nonzero_class_counts, held_out)
        except RequestRefused as error:
            self._counts_retry_at = time.monotonic() + _DATA_RETRY_S
            self._status.record(TroubleKind.DATA, f"The coordinator rejected this site's class counts: {error}")
        else:
            self._has_reported_counts = True
            self._status.clear(TroubleKind.DATA)

    # Training

    def _train(self, current: RoundTaskView, bundle: Bundle, data: SiteData) -> None:
        key = current.id, bundle.digest
        if self._trained is None or self._trained[0] != key:
            self._trained = None
            try:
                found = self._trainer.train(current, bundle, data)
            except DataError:  # the round is tried again when the data is back
                self._data, self._has_reported_counts = None, False
                self._data_retry_at = time.monotonic() + _DATA_RETRY_S
                return
            self._trained = None if found is None else (key, *found)
        trained, self._trained = self._trained, None
        if trained is None or not self._stage(current, *trained[1:]):
            self._given_up = key  # it would fail the same way; the next one starts from another model
            return
        self._deliver_pending_upload()
        self._own_training.follow_round(current.number, bundle, data, trained[1].report.seconds)

    # The site's own models

    def _has_own_work(self, task: TaskAnswer) -> bool:
        if self._data is None or self._newest is None or task.action == "train" or self._measure_retry_at is not None:
            return False
        return self._own_training.has_work(self._newest, self._data, is_over=task.action == "finished")

    def _work_on_own_models(self, task: TaskAnswer, poll: TaskPoll) -> None:
        newest, data = self._newest, self._data
        if newest is None or data is None:
            return
        self._own_training.use_pause(newest, data, poll.has_news, is_over=task.action == "finished")
        if self._own_training.is_undecided(newest) and not poll.has_news():
            self._status.enter(Phase.MEASURING, newest.number)
            decision = self._gate.reconsider(newest, data)
            self._own_training.note_decision(newest)
            if decision is not None:
                self._scores.report(self._coordinator, newest, decision, is_new=False)

    # Uploads

    def _stage(self, current: RoundTaskView, update: Update, private: Tensors) -> bool:
        """Store an update for the upload; return False if the coordinator could not accept it."""
        body, report = update.encode(), update.report
        if problem := self._upload_problem(current, body):
            self._status.record(
                TroubleKind.TRAINING,
                f"The update of round {current.number} cannot be uploaded: {problem} Waiting for the next round.",
                told=f"The update of round {current.number} cannot be uploaded: {problem}",
            )
            return False
        pending = PendingUpload(
            round_id=current.id, round_number=current.number, digest=digest(body), url=current.update_url
        )
        self._state.stage_upload(pending, body, private)
        logger.info(
            "round %d: trained on %d images in %.1f s, loss %.4f, accuracy %.1f %%",
            current.number,
            report.samples,
            report.seconds,
            report.loss,
            100 * report.accuracy,
        )
        return True

    def _upload_problem(self, current: RoundTaskView, body: bytes) -> str:
        if len(body) > current.max_update_bytes:
            return f"It has {len(body)} bytes; the coordinator accepts {current.max_update_bytes}."
        try:
            self._coordinator.check_upload(current.update_url)
        except ForeignUrl as error:
            return error.message
        return ""

    def _deliver_pending_upload(self) -> None:
        """Send the update that is not yet acknowledged; the coordinator recognizes a repeat by its digest."""
        found = self._state.pending()
        if found is None:
            return
        pending, body = found
        self._status.enter(Phase.UPLOADING, pending.round_number)
        try:
            self._coordinator.upload(pending.target, body, pending.digest)
        except (RequestRefused, ForeignUrl) as error:
            logger.warning("the update of round %d does not count: %s", pending.round_number, error)
            self._state.drop_upload()
        else:
            self._state.commit_upload()

    # Models

    def _newest_kept(self) -> Bundle | None:
        """Return the last model to arrive; None if it is damaged or the gate has not decided about it yet."""
        kept = self._state.models.all()
        decision = self._state.models.decision(kept[-1]) if kept else None
        if decision is None or decision.undecided:
            return None
        try:
            return self._state.models.load(kept[-1])
        except StateError as error:
            logger.warning("%s Downloading it again.", error)
            return None

    def _take_model(self, task: TaskAnswer) -> Bundle | None:
        """Return the newest model with this site's tensors, downloaded and measured if it is new.

        None if there is none, or if it cannot be used; the gate then records why.
        """
        pointer, newest = task.model, self._newest
        if pointer is None or task.personal_url is None:
            return None
        key = (pointer.number, pointer.digest)
        is_new = newest is None or (newest.number, newest.digest) != key
        if not is_new and task.action != "train":
            self._status.clear(TroubleKind.MODEL)
            return newest
        if self._unusable is not None and self._unusable[0] == key and time.monotonic() < self._unusable[1]:
            return None
        try:
            self._status.enter(Phase.DOWNLOADING, pointer.number)
            bundle = self._fetcher.fetch(self._coordinator, pointer, task.personal_url, task.facts, newest)
        except (StopRequested, AgentEnded, OSError, StateError):
            raise
        except Exception as error:
            if isinstance(error, RequestRefused) and self._refused != key:
                self._refused = key  # a newer one may just have replaced it; the next task will tell
                raise
            is_first = self._unusable is None or self._unusable[0] != key
            pause_s = _REFUSED_RETRY_S if isinstance(error, RequestRefused) else _MODEL_RETRY_S
            self._unusable = key, time.monotonic() + pause_s
            if is_new and is_first:
                self._gate.reject(pointer.number, pointer.digest, error)
            self._status.record(TroubleKind.MODEL, f"Model {pointer.number} cannot be used: {describe_error(error)}")
            return None
        self._refused = None
        self._status.clear(TroubleKind.MODEL)
        if is_new:
            served = self._gate.served
            self._state.models.save(bundle, self._options.keep_models, None if served is None else served.key)
            self._measure(bundle)
            self._newest = bundle
        return bundle

    def _measure(self, bundle: Bundle) -> None:
        self._status.enter(Phase.MEASURING, bundle.number)
        decision = self._gate.consider(bundle, self._data)
        self._own_training.note_decision(bundle)
        self._measure_retry_at = time.monotonic() + _MODEL_RETRY_S if decision.undecided else None
        if self._data is not None:
            report_unreadable(self._status, self._data)
        self._scores.report(self._coordinator, bundle, decision)
