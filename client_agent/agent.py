"""The agent's loop: poll, download, measure, swap, train, upload; through everything that can be survived.

What can recover is recorded as a trouble, waited out and tried again. What cannot (revoked, left, cancelled, an invalid
token) ends the loop with AgentEnded. Predictions are served beside it and do not depend on it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from client_agent.backoff import Backoff
from client_agent.condition import Condition, Phase, TroubleKind
from client_agent.coordinator import Coordinator
from client_agent.data import SiteData
from client_agent.errors import AgentEnded, DataError, Ending, Refused, StateError, Stopped
from client_agent.fetching import ModelFetcher
from client_agent.info import describe_agent
from client_agent.kept_models import Bundle
from client_agent.model_gate import ModelGate
from client_agent.progress import TrainingDisplay
from client_agent.settings import Identity, RunOptions
from client_agent.state import PendingUpload, StateFolder
from client_agent.training import LocalBaseline
from shared.methods import client_half
from shared.methods.base import RoundTask, Tensors, TrainingInterrupted, Update, Workplace
from shared.problems import DistransError
from shared.runtime import Runtime
from shared.schemas import RoundTaskView, TaskAnswer
from shared.wire import digest

logger = logging.getLogger(__name__)
_NO_TICKET = "none"  # whatever the coordinator answers is news
_AFTER_FAILURE_S = 10.0  # between two polls while there is a round that cannot be trained here
_REFUSED_AGAIN_S = 60.0  # until a model that the coordinator refuses to hand out is asked for again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 120.0
_DATA_AGAIN_S = 60.0  # until data that could not be opened, or counts that were refused, are tried again
_MODEL_AGAIN_S = 900.0  # until a model that could not be fetched or measured is tried again


@dataclass(frozen=True)
class Parts:
    """What a loop is made of; `connect` and `open_data` may fail and are tried again."""

    state: StateFolder
    identity: Identity
    options: RunOptions
    runtime: Runtime
    gate: ModelGate
    condition: Condition
    console: Console
    stopping: threading.Event
    connect: Callable[[], Coordinator]
    open_data: Callable[[], SiteData]


class Agent:
    """One site's part in a federation."""

    def __init__(self, parts: Parts) -> None:
        self._state, self._identity, self._options = parts.state, parts.identity, parts.options
        self._gate, self._condition, self._stopping = parts.gate, parts.condition, parts.stopping
        self._parts, self._plan = parts, parts.identity.plan
        self._half, self._fetcher = client_half(self._plan), ModelFetcher(parts.state, self._plan)
        self._connection: Coordinator | None = None
        self._data: SiteData | None = None
        self._data_again_at = 0.0
        self._has_told_counts, self._counts_again_at = False, 0.0
        self._newest: Bundle | None = None  # the last one that the gate has decided about
        self._measure_again_at: float | None = None  # when it is to be measured again, if it could not be
        self._unusable: tuple[tuple[int, str], float] | None = None  # a model that could not be fetched; again when
        self._refused: tuple[int, str] | None = None  # a model that the coordinator refused to hand out once
        self._given_up: tuple[int, str] | None = None  # a round that cannot be trained here, with its model's digest
        self._trained: tuple[tuple[int, str], Update, Tensors] | None = None  # not on the disk yet
        self._ticket = _NO_TICKET

    # The loop

    def prepare(self) -> None:
        """Connect and open the data, or raise what is wrong with either."""
        _ = self._coordinator
        if self._options.train and self._data is None:
            self._open_data()

    def _open_data(self) -> None:
        self._data = self._parts.open_data()
        self._condition.note_data(self._data.report.test_images)

    def run(self) -> None:
        """Until the agent is stopped or the federation has ended; raises AgentEnded when its part is over for good."""
        self._condition.start()
        backoff = Backoff(self._stopping, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        is_over = False
        while not is_over and not self._stopping.is_set():
            try:
                is_over = self._step()
            except (Stopped, AgentEnded):
                raise
            except Exception as error:
                self._ticket = _NO_TICKET
                pause_s = backoff.choose_s()
                self._record(error, pause_s)
                self._condition.enter(Phase.PAUSING)
                backoff.wait(pause_s)
            else:
                backoff.reset()
                for kind in (TroubleKind.COORDINATOR, TroubleKind.STORAGE, TroubleKind.UNEXPECTED):
                    self._condition.clear(kind)

    def _record(self, error: Exception, pause_s: float) -> None:
        if isinstance(error, Refused):
            self._condition.record(TroubleKind.COORDINATOR, f"The coordinator refuses a request: {error}")
        elif isinstance(error, (OSError, StateError)):
            self._condition.record(TroubleKind.STORAGE, f"The state folder {self._state.path} cannot be used: {error}")
        elif isinstance(error, DistransError):
            self._condition.record(TroubleKind.COORDINATOR, str(error))
        else:
            logger.error("the loop met an error that was not expected; trying again in %.0f s", pause_s, exc_info=error)
            self._condition.record(TroubleKind.UNEXPECTED, _in_words(error))

    def _step(self) -> bool:
        """One task of the coordinator's; True when there will be no other."""
        self._look_for_data()
        if self._newest is None:
            self._newest = self._newest_kept()
        self._settle_pending()
        self._condition.enter(Phase.WAITING)
        task = self._coordinator.task(self._ticket)
        self._ticket = task.ticket
        if task.action == "cancelled":
            raise AgentEnded(Ending.CANCELLED, f"The federation was cancelled: {task.reason}")
        if task.round is not None and task.model is not None and self._given_up == (task.round.id, task.model.digest):
            # The coordinator does not know that and hands the round out at once, again and again.
            self._wait_to_try_again()
            return False
        bundle = self._take_model(task)
        cannot_train = task.action == "train" and (bundle is None or self._data is None)
        if cannot_train or (bundle is None and task.model is not None):
            self._wait_to_try_again()  # whatever the coordinator announces next
        elif task.action == "train" and task.round is not None and bundle is not None and self._data is not None:
            self._train(task.round, bundle, self._data)
            self._ticket = _NO_TICKET
        if task.action == "finished":
            self._condition.finish(f"The federation has finished: {task.reason}")
            return self._options.exit_when_finished or self._options.serve is None
        return False

    def _wait_to_try_again(self) -> None:
        self._condition.enter(Phase.PAUSING)  # the operator would otherwise see the last step, such as a download
        self._stopping.wait(_AFTER_FAILURE_S)

    @property
    def _coordinator(self) -> Coordinator:
        if self._connection is None:
            self._connection = self._parts.connect()
        return self._connection

    # Data

    def _look_for_data(self) -> None:
        if not self._options.train:
            return
        if self._data is None and time.monotonic() >= self._data_again_at:
            try:
                self._open_data()
            except Exception as error:
                self._data_again_at = time.monotonic() + _DATA_AGAIN_S
                self._condition.record(TroubleKind.DATA, _in_words(error))
            else:
                self._condition.clear(TroubleKind.DATA)
                self._measure_again_at = self._measure_again_at and time.monotonic()
        if self._data is not None:
            self._tell_class_counts(self._data)
            is_due = self._measure_again_at is not None and time.monotonic() >= self._measure_again_at
            if is_due and self._newest is not None:
                self._measure(self._newest)

    def _tell_class_counts(self, data: SiteData) -> None:
        if self._has_told_counts or time.monotonic() < self._counts_again_at:
            return
        report = data.report
        try:
            known = self._coordinator.me()
            if (known.class_counts, known.held_out_images) != (report.class_counts, report.test_images):
                logger.info("the numbers of images have changed; reporting them to the coordinator")
                self._coordinator.update_counts(report.held_classes, report.test_images)
        except Refused as error:
            self._counts_again_at = time.monotonic() + _DATA_AGAIN_S
            self._condition.record(TroubleKind.DATA, f"The coordinator rejects this site's class counts: {error}")
        else:
            self._has_told_counts = True
            self._condition.clear(TroubleKind.DATA)

    def _note_unreadable(self, data: SiteData) -> None:
        if found := data.describe_unreadable():
            count = len(data.train.unreadable) + len(data.test.unreadable)
            told = f"{count} of {data.train.samples + data.test.samples} images cannot be read."
            self._condition.record(TroubleKind.IMAGES, found, told)
        else:
            self._condition.clear(TroubleKind.IMAGES)

    # Training

    def _train(self, current: RoundTaskView, bundle: Bundle, data: SiteData) -> None:
        key = current.id, bundle.digest
        if self._trained is None or self._trained[0] != key:
            found = self._train_round(current, bundle, data)
            self._trained = None if found is None else (key, *found)
        if self._trained is None:
            if self._data is not None:  # else the round is tried again when the data are back
                self._given_up = key  # it would end in the same way; the next one starts from another model
            return
        self._stage(current, *self._trained[1:])
        self._trained = None
        self._settle_pending()
        if self._options.local_baseline:
            self._train_baseline(current.number, data)

    def _train_round(self, current: RoundTaskView, bundle: Bundle, data: SiteData) -> tuple[Update, Tensors] | None:
        """The update and the private tensors that go with it; None when this round cannot be trained here."""
        self._condition.enter(Phase.TRAINING, current.number)
        task = RoundTask(self._identity.name, current.number, bundle.shared, bundle.personal, current.facts)
        private = self._state.private()
        try:
            with TrainingDisplay(current.number, self._parts.console, self._options.progress) as display:
                place = Workplace(data.train, self._parts.runtime, display.update, self._stopping.is_set)
                trained = self._half.train(task, private, place)
        except TrainingInterrupted as error:
            raise Stopped from error
        except DataError as error:
            self._condition.record(
                TroubleKind.TRAINING,
                f"Round {current.number} could not be trained here: {_in_words(error)} Trying again in a minute.",
                told=f"Round {current.number} could not be trained: too many images cannot be read.",
            )
            self._data, self._has_told_counts = None, False
            self._data_again_at = time.monotonic() + _DATA_AGAIN_S
            return None
        except Exception as error:  # such as a diverged loss, or torch's RuntimeError when memory runs out
            logger.debug("round %d could not be trained", current.number, exc_info=error)
            self._condition.record(
                TroubleKind.TRAINING,
                f"Round {current.number} could not be trained here: {_in_words(error)} "
                "Waiting for the next round; /predict keeps answering.",
                told=f"Round {current.number} could not be trained: {type(error).__name__}.",
            )
            return None
        self._condition.clear(TroubleKind.TRAINING)
        self._note_unreadable(data)
        return trained

    def _train_baseline(self, number: int, data: SiteData) -> None:
        self._condition.enter(Phase.TRAINING_BASELINE, number)
        baseline = LocalBaseline(self._plan, self._identity.name)
        place = Workplace(data.train, self._parts.runtime, None, self._stopping.is_set)
        try:
            self._state.save_baseline(baseline.train(self._state.baseline(), number, place))
        except TrainingInterrupted as error:
            raise Stopped from error
        except Exception as error:
            logger.error("this site's own model could not be trained: %s", error)

    # Uploads

    def _stage(self, current: RoundTaskView, update: Update, private: Tensors) -> None:
        body, report = update.encode(), update.report
        pending = PendingUpload(round_id=current.id, round_number=current.number, digest=digest(body))
        self._state.stage_upload(pending, body, private)
        logger.info(
            "round %d: trained on %d images in %.1f s, loss %.4f, accuracy %.1f %%",
            current.number,
            report.samples,
            report.seconds,
            report.loss,
            100 * report.accuracy,
        )

    def _settle_pending(self) -> None:
        """Send the upload that is not acknowledged yet; the coordinator knows a repeat by its digest."""
        found = self._state.pending()
        if found is None:
            return
        pending, body = found
        self._condition.enter(Phase.UPLOADING, pending.round_number)
        try:
            self._coordinator.upload(pending.round_id, body, pending.digest)
        except Refused as error:
            logger.warning("the update of round %d does not count: %s", pending.round_number, error)
            self._state.drop_upload()
        else:
            self._state.commit_upload()

    # Models

    def _newest_kept(self) -> Bundle | None:
        """Return the last model to arrive, or None; one the gate never decided about is fetched again."""
        kept = self._state.kept_models()
        line = self._state.decision(kept[-1]) if kept else None
        if line is None or line.undecided:
            return None
        try:
            return self._state.load(kept[-1])
        except StateError as error:
            logger.warning("%s It is fetched again.", error)
            return None

    def _take_model(self, task: TaskAnswer) -> Bundle | None:
        """The newest model with this site's tensors: downloaded and measured unless it was before.

        None when there is none, or none that can be used; the gate has then recorded why.
        """
        pointer, newest = task.model, self._newest
        if pointer is None or task.personal_url is None:
            return None
        key = (pointer.number, pointer.digest)
        is_new = newest is None or (newest.number, newest.digest) != key
        if not is_new and task.action != "train":
            self._condition.clear(TroubleKind.MODEL)
            return newest
        if self._unusable is not None and self._unusable[0] == key and time.monotonic() < self._unusable[1]:
            return None
        try:
            self._condition.enter(Phase.DOWNLOADING, pointer.number)
            bundle = self._fetcher.fetch(self._coordinator, pointer, task.personal_url, task.facts, newest)
        except (Stopped, AgentEnded, OSError, StateError):
            raise
        except Exception as error:
            if isinstance(error, Refused) and self._refused != key:
                self._refused = key  # it may just have been overtaken: the next task names another one
                raise
            is_first = self._unusable is None or self._unusable[0] != key
            pause_s = _REFUSED_AGAIN_S if isinstance(error, Refused) else _MODEL_AGAIN_S
            self._unusable = key, time.monotonic() + pause_s
            if is_new and is_first:
                self._gate.reject(pointer.number, pointer.digest, error)
            self._condition.record(TroubleKind.MODEL, f"Model {pointer.number} cannot be used: {_in_words(error)}")
            return None
        self._refused = None
        self._condition.clear(TroubleKind.MODEL)
        if is_new:
            served = self._gate.served
            self._state.save_bundle(bundle, self._options.keep_models, None if served is None else served.key)
            self._measure(bundle)
            self._newest = bundle
        return bundle

    def _measure(self, bundle: Bundle) -> None:
        self._condition.enter(Phase.MEASURING, bundle.number)
        line = self._gate.consider(bundle, self._data)
        self._measure_again_at = time.monotonic() + _MODEL_AGAIN_S if line.undecided else None
        own = line.with_offset
        if own is None or own.accuracy is None:
            logger.info("received model %d: not measured", bundle.number)
        else:
            score = f"{100 * own.accuracy:.1f} % accuracy on {own.samples} held-out images"
            logger.info("received model %d: %s", bundle.number, score)
        if self._data is not None:
            self._note_unreadable(self._data)
        if own is not None:
            try:
                self._coordinator.evaluation(bundle.number, own)
            except AgentEnded:
                raise
            except DistransError as error:
                logger.warning("the score of model %d was not delivered: %s", bundle.number, error)

    def info(self) -> dict[str, Any]:
        """For `/info`."""
        parts, connection = self._parts, self._connection
        return describe_agent(parts.state, parts.identity, parts.runtime, parts.gate, parts.condition, connection)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, DistransError) else f"{type(error).__name__}: {error}."
