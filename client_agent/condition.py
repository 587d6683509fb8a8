"""What the agent is doing, what troubles it, and how its loop ended: state that programs act on and people read."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from client_agent.errors import AgentEnded, Ending
from client_agent.text import storable

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """The steps of the loop."""

    STARTING = "starting"
    WAITING = "waiting"
    DOWNLOADING = "downloading"
    MEASURING = "measuring"
    TRAINING = "training"
    TRAINING_BASELINE = "training-baseline"
    UPLOADING = "uploading"
    PAUSING = "pausing"
    ENDED = "ended"


_WORDS = {
    Phase.STARTING: "starting",
    Phase.WAITING: "waiting for work",
    Phase.DOWNLOADING: "downloading model {}",
    Phase.MEASURING: "measuring model {}",
    Phase.TRAINING: "training round {}",
    Phase.TRAINING_BASELINE: "training this site's own model, round {}",
    Phase.UPLOADING: "uploading round {}",
    Phase.PAUSING: "waiting to try again",
    Phase.ENDED: "ended",
}


@dataclass(frozen=True)
class Activity:
    """A step of the loop, with the number of the round or model it is about."""

    phase: Phase
    number: int | None = None

    @property
    def stops_soon(self) -> bool:
        """Whether it looks at the request to stop and ends by itself, within a batch."""
        return self.phase in (Phase.TRAINING, Phase.TRAINING_BASELINE)

    def __str__(self) -> str:
        return _WORDS[self.phase].format(self.number)


class TroubleKind(StrEnum):
    """What a trouble is about; there is at most one of each kind at a time."""

    COORDINATOR = "coordinator"
    DATA = "data"
    IMAGES = "images"
    MODEL = "model"
    TRAINING = "training"
    STORAGE = "storage"
    PIN = "pin"
    UNEXPECTED = "unexpected"


# What the coordinator is told of a trouble. The message itself stays here: names of files can name patients.
_TOLD = {
    TroubleKind.COORDINATOR: "The coordinator refused a request, or could not be reached.",
    TroubleKind.DATA: "The site's data cannot be opened, or its class counts were rejected.",
    TroubleKind.IMAGES: "Some images cannot be read.",
    TroubleKind.MODEL: "A model could not be fetched or used.",
    TroubleKind.TRAINING: "A round could not be trained.",
    TroubleKind.STORAGE: "The state folder cannot be used.",
    TroubleKind.PIN: "The pin cannot be read.",
    TroubleKind.UNEXPECTED: "The agent met an unexpected error.",
}


class Trouble(BaseModel):
    """Something that keeps the agent from taking part as it should; predictions go on."""

    model_config = ConfigDict(frozen=True)
    kind: TroubleKind
    message: str
    since: float
    told: str = ""  # what the coordinator may know of it


class Served(BaseModel):
    """The model that answers /predict, and since when it does, restarts included."""

    model_config = ConfigDict(frozen=True)
    number: int
    digest: str
    fingerprint: str
    since: float

    @property
    def key(self) -> tuple[int, str, str]:
        """What names exactly this model."""
        return self.number, self.digest, self.fingerprint


class Report(BaseModel):
    """A condition as `status` and `/info` show it."""

    model_config = ConfigDict(frozen=True)
    ended: Ending | None = None
    outcome: str = ""
    troubles: list[Trouble] = []
    serving: Served | None = None
    held_out_images: int | None = None  # None: the data have not been opened yet


class Condition:
    """The loop's state, written by the loop and read by the web service and at shutdown."""

    def __init__(self, save: Callable[[Report], None] = lambda _report: None, previous: Report | None = None) -> None:
        """`previous` is what an earlier run has left."""
        previous = previous or Report()
        self._save, self._saving, self._lock = save, threading.Lock(), threading.Lock()
        self.changed = threading.Event()  # set with every change; whoever waits for it clears it
        self._served_before = previous.serving
        self._serving: Served | None = None
        self._held_out_images = previous.held_out_images
        self._troubles: dict[TroubleKind, Trouble] = {}
        self._ended: Ending | None = None
        self._lost_at: float | None = None  # when the coordinator stopped answering, by the monotonic clock
        self.activity = Activity(Phase.STARTING)
        self.outcome = ""

    @property
    def report(self) -> Report:
        """A snapshot."""
        with self._lock:
            return Report(
                ended=self._ended,
                outcome=self.outcome,
                troubles=list(self._troubles.values()),
                serving=self._serving,
                held_out_images=self._held_out_images,
            )

    def enter(self, phase: Phase, number: int | None = None) -> None:
        """The loop has come to another step."""
        self.activity = Activity(phase, number)
        self.changed.set()

    def serve(self, number: int, digest: str, fingerprint: str) -> None:
        """Another model answers /predict from now on, or again the one that did before a restart."""
        with self._lock:
            served = Served(number=number, digest=digest, fingerprint=fingerprint, since=time.time())
            known = self._serving or self._served_before
            self._serving = known if known is not None and known.key == served.key else served
        self._keep()

    def note_data(self, held_out_images: int) -> None:
        """The site's data are open."""
        with self._lock:
            self._held_out_images = held_out_images
        self._keep()

    def record(self, kind: TroubleKind, message: str, told: str = "") -> None:
        """Note a trouble, and log it unless it is the same as before; `told` replaces what the coordinator is told."""
        message = storable(message)
        with self._lock:
            known = self._troubles.get(kind)
            if known is not None and known.message == message:
                return
            self._troubles[kind] = Trouble(
                kind=kind, message=message, since=time.time(), told=storable(told or _TOLD[kind])
            )
        logger.error("%s: %s", kind, message)
        self._keep()

    def clear(self, kind: TroubleKind) -> None:
        """The trouble is over."""
        with self._lock:
            known = self._troubles.pop(kind, None)
        if known is not None:
            logger.info("%s: recovered from: %s", kind, known.message)
            self._keep()

    def note_coordinator(self, problem: str) -> None:
        """Why the coordinator did not answer; empty when it did, which ends an outage."""
        if problem:
            self._lost_at = self._lost_at or time.monotonic()
            self.record(TroubleKind.COORDINATOR, f"The coordinator does not answer: {problem}")
        elif self._lost_at is not None:
            outage_s, self._lost_at = time.monotonic() - self._lost_at, None
            with self._lock:
                self._troubles.pop(TroubleKind.COORDINATOR, None)
            logger.info("reconnected to the coordinator after %.0f s", outage_s)
            self._keep()

    def finish(self, outcome: str) -> None:
        """The federation is over; the loop may go on."""
        outcome = storable(outcome)
        if outcome != self.outcome:
            self.outcome = outcome
            logger.info("%s", outcome)
            self._keep()

    def end(self, error: AgentEnded) -> None:
        """The loop is over for good."""
        self._ended, self.outcome = error.ending, storable(str(error))
        self.enter(Phase.ENDED)
        logger.error("ended: %s: %s", error.ending, self.outcome)
        self._keep()

    def start(self) -> None:
        """Forget how an earlier run ended, also on the disk."""
        self._ended, self.outcome = None, ""
        self.enter(Phase.STARTING)
        self._keep()

    def _keep(self) -> None:
        self.changed.set()
        try:
            with self._saving:
                self._save(self.report)
        except Exception as error:  # a full disk is a trouble of its own; this file is for people
            logger.warning("the agent's condition could not be written: %s", error)
