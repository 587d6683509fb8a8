"""The agent's status: what it is doing, its current troubles, what it serves, and how its loop ended."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from client_agent.errors import AgentEnded, Ending
from client_agent.model_key import ModelKey
from client_agent.text import truncate_and_escape

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """The steps of the loop."""

    STARTING = "starting"
    WAITING = "waiting"
    DOWNLOADING = "downloading"
    MEASURING = "measuring"
    TRAINING = "training"
    TRAINING_ALONE = "training-alone"
    ADAPTING = "adapting"
    UPLOADING = "uploading"
    PAUSING = "pausing"
    ENDED = "ended"


_WORDS = {
    Phase.STARTING: "starting",
    Phase.WAITING: "waiting for work",
    Phase.DOWNLOADING: "downloading model {}",
    Phase.MEASURING: "measuring model {}",
    Phase.TRAINING: "training round {}",
    Phase.TRAINING_ALONE: "training this site's own model, round {}",
    Phase.ADAPTING: "fine-tuning model {} on this site's images",
    Phase.UPLOADING: "uploading round {}",
    Phase.PAUSING: "waiting to try again",
    Phase.ENDED: "ended",
}


@dataclass(frozen=True)
class Activity:
    """A step of the loop, with the number of its round or model."""

    phase: Phase
    number: int | None = None

    @property
    def is_interruptible(self) -> bool:
        """Whether it notices a stop request and ends within a batch."""
        return self.phase in (Phase.TRAINING, Phase.TRAINING_ALONE, Phase.ADAPTING)

    def __str__(self) -> str:
        return _WORDS[self.phase].format(self.number)


@dataclass(frozen=True)
class Progress:
    """How many of a round's batches have been trained."""

    batch: int
    batches: int


class TroubleKind(StrEnum):
    """The kinds of trouble; there is at most one trouble per kind at a time."""

    COORDINATOR = "coordinator"
    DATA = "data"
    IMAGES = "images"
    MODEL = "model"
    TRAINING = "training"
    STORAGE = "storage"
    PIN = "pin"
    UNEXPECTED = "unexpected"


# What the coordinator learns about a trouble. The full message stays here: file names can contain patient names.
_PUBLIC_MESSAGES = {
    TroubleKind.COORDINATOR: "The coordinator rejected a request or could not be reached.",
    TroubleKind.DATA: "The site's data cannot be opened, or the coordinator rejected its class counts.",
    TroubleKind.IMAGES: "Some images cannot be read.",
    TroubleKind.MODEL: "A model could not be downloaded or used.",
    TroubleKind.TRAINING: "A round could not be trained.",
    TroubleKind.STORAGE: "The state folder cannot be used.",
    TroubleKind.PIN: "The pin cannot be read.",
    TroubleKind.UNEXPECTED: "Unexpected error in the agent.",
}


class Trouble(BaseModel):
    """A problem that keeps the agent from taking part fully; predictions continue."""

    model_config = ConfigDict(frozen=True)
    kind: TroubleKind
    message: str
    since: float
    told: str = ""  # the message for the coordinator


class HoldoutSizes(BaseModel):
    """How many held-out images choose and how many test; if they are too few to split, all of them do both."""

    model_config = ConfigDict(frozen=True)
    validation: int
    test: int
    is_split: bool

    @property
    def images(self) -> int:
        """Number of held-out images."""
        return self.validation + self.test if self.is_split else self.test

    def __str__(self) -> str:
        if not self.images:
            return "0; models are served without being measured"
        if self.is_split:
            return f"{self.images} ({self.validation} choose what is served, {self.test} test it)"
        return f"{self.images} (too few to split: each is predicted by what the others choose)"


class Served(BaseModel):
    """The model that answers /predict, and since when, across restarts."""

    model_config = ConfigDict(frozen=True)
    number: int
    digest: str
    fingerprint: str
    since: float
    record: str = ""  # digest of the candidate's record; see client_agent.state.records

    @property
    def key(self) -> ModelKey:
        """Identifies the model."""
        return ModelKey(self.number, self.digest, self.fingerprint)


class StatusSnapshot(BaseModel):
    """An agent's status at one moment, as `status` and `/info` show it."""

    model_config = ConfigDict(frozen=True)
    ended: Ending | None = None
    outcome: str = ""
    troubles: list[Trouble] = []
    serving: Served | None = None
    held_out_images: int | None = None  # None before the data was first opened
    holdout: HoldoutSizes | None = None  # missing from files of older agents


class AgentStatus:
    """The agent's live status: written by the loop, read by other threads, saved on every change."""

    def __init__(
        self, save: Callable[[StatusSnapshot], None] = lambda _report: None, previous: StatusSnapshot | None = None
    ) -> None:
        """Continue from the snapshot that an earlier run saved, if any."""
        previous = previous or StatusSnapshot()
        self._save, self._saving, self._lock = save, threading.Lock(), threading.Lock()
        self.changed = threading.Event()  # set on every change; the waiter clears it
        self.revision = 0  # differs after every change
        self._served_before = previous.serving
        self._serving: Served | None = None
        self._held_out_images, self._holdout = previous.held_out_images, previous.holdout
        self._troubles: dict[TroubleKind, Trouble] = {}
        self._ended: Ending | None = None
        self._lost_at: float | None = None  # monotonic time at which the coordinator stopped answering
        self.activity = Activity(Phase.STARTING)
        self.progress: Progress | None = None  # of the round that is being trained
        self.outcome = ""

    @property
    def report(self) -> StatusSnapshot:
        """The current snapshot."""
        with self._lock:
            return StatusSnapshot(
                ended=self._ended,
                outcome=self.outcome,
                troubles=list(self._troubles.values()),
                serving=self._serving,
                held_out_images=self._held_out_images,
                holdout=self._holdout,
            )

    def enter(self, phase: Phase, number: int | None = None) -> None:
        """Note that the loop started another step."""
        self.activity, self.progress = Activity(phase, number), None
        self._note_change()

    def note_progress(self, batch: int, batches: int) -> None:
        """Note how far the round's training is; nobody is told, but whoever asks can see it."""
        self.progress = Progress(batch, batches)

    def serve(self, key: ModelKey, record: str = "") -> None:
        """Note what answers /predict from now on; a candidate that already did so before a restart keeps its date."""
        with self._lock:
            known = self._serving or self._served_before
            is_known = known is not None and (known.key, known.record) == (key, record)
            self._serving = known if is_known else Served(**key._asdict(), record=record, since=time.time())
        self._publish()

    def note_data(self, holdout: HoldoutSizes) -> None:
        """Note that the site's data was opened."""
        with self._lock:
            self._held_out_images, self._holdout = holdout.images, holdout
        self._publish()

    def record(self, kind: TroubleKind, message: str, told: str = "") -> None:
        """Record a trouble, and log it if it is new; `told` overrides the coordinator's version of the message."""
        message = truncate_and_escape(message)
        with self._lock:
            known = self._troubles.get(kind)
            if known is not None and known.message == message:
                return
            self._troubles[kind] = Trouble(
                kind=kind, message=message, since=time.time(), told=truncate_and_escape(told or _PUBLIC_MESSAGES[kind])
            )
        logger.error("%s: %s", kind, message)
        self._publish()

    def clear(self, kind: TroubleKind) -> None:
        """Note that a trouble is over."""
        with self._lock:
            known = self._troubles.pop(kind, None)
        if known is not None:
            logger.info("%s: recovered from: %s", kind, known.message)
            self._publish()

    def note_coordinator(self, problem: str) -> None:
        """Note why the coordinator did not answer; an empty string means that it did."""
        if problem:
            self._lost_at = self._lost_at or time.monotonic()
            self.record(TroubleKind.COORDINATOR, f"The coordinator does not answer: {problem}")
        elif self._lost_at is not None:
            outage_s, self._lost_at = time.monotonic() - self._lost_at, None
            with self._lock:
                self._troubles.pop(TroubleKind.COORDINATOR, None)
            logger.info("reconnected to the coordinator after %.0f s", outage_s)
            self._publish()

    def finish(self, outcome: str) -> None:
        """Note that the federation is over; the loop may continue."""
        outcome = truncate_and_escape(outcome)
        if outcome != self.outcome:
            self.outcome = outcome
            logger.info("%s", outcome)
            self._publish()

    def end(self, error: AgentEnded) -> None:
        """Note that the loop has ended for good."""
        self._ended, self.outcome = error.ending, truncate_and_escape(str(error))
        self.enter(Phase.ENDED)
        logger.error("ended: %s: %s", error.ending, self.outcome)
        self._publish()

    def start(self) -> None:
        """Forget how an earlier run ended, on disk too."""
        self._ended, self.outcome = None, ""
        self.enter(Phase.STARTING)
        self._publish()

    def _note_change(self) -> None:
        with self._lock:
            self.revision += 1
        self.changed.set()

    def _publish(self) -> None:
        self._note_change()
        try:
            with self._saving:
                self._save(self.report)
        except Exception as error:  # the loop reports a full disk itself; this file only informs people
            logger.warning("could not save the agent's status: %s", error)
