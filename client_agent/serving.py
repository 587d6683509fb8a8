"""The model that answers: built aside, checked, then put in place by one assignment."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from client_agent.errors import StateError
from client_agent.kept_models import Bundle
from client_agent.settings import Identity
from client_agent.state import StateFolder
from client_agent.threads import limit_threads
from shared.methods import client_half
from shared.methods.base import Predictor
from shared.plan import FederationPlan
from shared.problems import DistransError
from shared.runtime import Runtime
from shared.wire import digest, encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingModel:
    """A model with this site's offset, ready to answer; it never changes."""

    own: Predictor = field(repr=False)
    none: Predictor = field(repr=False)  # without the offset, for comparison
    federation: str
    number: int
    digest: str
    offset_digest: str | None
    classes: tuple[str, ...]
    fingerprint: str = ""  # of the bundle, see kept_models.py

    @property
    def key(self) -> tuple[int, str, str]:
        """Number, digest and fingerprint, which name exactly this model."""
        return self.number, self.digest, self.fingerprint


def build(plan: FederationPlan, name: str, bundle: Bundle, runtime: Runtime) -> ServingModel:
    """Build a model, run it once, and refuse it when it does not answer with numbers."""
    half, task = client_half(plan), bundle.task(name)
    offset = half.offset(task, bundle.private)
    model = ServingModel(
        own=half.predictor(task, bundle.private, runtime),
        none=half.predictor(task, bundle.private, runtime, use_offset=False),
        federation=plan.name,
        number=bundle.number,
        digest=bundle.digest,
        offset_digest=None if offset is None else digest(encode({"offset": offset})),
        classes=plan.classes,
        fingerprint=bundle.fingerprint,
    )
    if not bool(model.own(torch.zeros(1, *plan.image.shape)).isfinite().all()):
        raise DistransError(f"Model {bundle.number} does not answer with finite numbers.")
    return model


def load_served(state: StateFolder, identity: Identity, runtime: Runtime) -> tuple[Bundle, ServingModel]:
    """The model that this site predicts with: the choice of `/predict`, `distrans-agent predict` and `export` alike.

    A model that cannot be read or built is passed over for the next choice; StateError when none is left.
    """
    pinned = state.pinned()
    choices = state.choices()
    if pinned is not None and not state.has_pinned():
        logger.warning("the kept model %d cannot be served: /predict is pinned to it, but it is not kept", pinned)
    for kept in choices:
        try:
            bundle = state.load(kept)
            return bundle, build(identity.plan, identity.name, bundle, runtime)
        except Exception as error:  # whatever is wrong with this one, another one may be good
            logger.warning("the kept model %d cannot be served: %s", kept.number, error)
    if choices:
        raise StateError(
            f"None of the {len(choices)} approved models that are kept can be read.",
            next_step="The log has the reasons; restore the models folder from a backup, or wait for the next model.",
        )
    if state.kept_models():
        raise StateError(
            "None of the kept models has been approved by the gate.",
            next_step="See distrans-agent status for the reasons; distrans-agent pin ROUND serves one all the same.",
        )
    raise StateError("There is no model yet.", next_step="Run distrans-agent run until a round is done.")


class QueueFull(Exception):
    """Too many requests wait already."""


@dataclass(frozen=True)
class Answer:
    """Probabilities (B, classes) of one model, as far as they were asked for."""

    model: ServingModel
    own: Tensor | None
    without_offset: Tensor | None


@dataclass(frozen=True)
class _Job:
    images: Tensor
    own: bool
    without_offset: bool
    answer: "Future[Answer]"


class PredictionQueue:
    """Answers requests in threads of its own, taking those that wait together through the network as one batch.

    The thread that has decoded a request's images also takes them through the network, unless another thread is
    doing so: then that one takes them along in its next batch. A lone request thus changes threads only twice.
    """

    def __init__(self, max_waiting: int, max_batch: int, threads: int) -> None:
        self._max_waiting, self._max_batch = max_waiting, max_batch
        self._lock = threading.Lock()  # held for a moment, never while decoding or computing
        self._unanswered = 0
        self._ready: deque[_Job] = deque()
        self._computing = False
        self.model: ServingModel | None = None  # replaced as a whole; a batch uses the one it began with
        # One thread computes; there is always another one to decode meanwhile.
        self._pool = ThreadPoolExecutor(
            max(2, threads), thread_name_prefix="predict", initializer=limit_threads, initargs=(threads,)
        )

    @property
    def is_full(self) -> bool:
        """Whether `submit` would refuse a request now."""
        return self._unanswered >= self._max_waiting

    def submit(
        self, prepare: Callable[[], Tensor], *, own: bool = True, without_offset: bool = False
    ) -> "Future[Answer]":
        """Classify the images (B, C, H, W) that `prepare` makes in a thread here; what it raises, the answer raises."""
        with self._lock:
            if self.is_full:
                raise QueueFull
            self._unanswered += 1
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()  # from here on a caller that goes away cannot cancel it
        answer.add_done_callback(self._count_answered)
        self._pool.submit(self._handle, prepare, own, without_offset, answer)
        return answer

    def stop(self) -> None:
        """Answer what waits, then end."""
        self._pool.shutdown()

    def _count_answered(self, _answer: "Future[Answer]") -> None:
        with self._lock:
            self._unanswered -= 1

    def _handle(self, prepare: Callable[[], Tensor], own: bool, without_offset: bool, answer: "Future[Answer]") -> None:
        try:
            images = prepare()
        except Exception as error:  # the caller's to explain
            answer.set_exception(error)
            return
        with self._lock:
            self._ready.append(_Job(images, own, without_offset, answer))
            if self._computing:
                return
            self._computing = True
        while jobs := self._next_batch():
            self._answer(jobs)

    def _next_batch(self) -> list[_Job]:
        """Jobs that go through the network together; none: this thread no longer computes."""
        with self._lock:
            jobs: list[_Job] = []
            images = 0
            while self._ready and images < self._max_batch:
                jobs.append(self._ready.popleft())
                images += len(jobs[-1].images)
            self._computing = bool(jobs)
            return jobs

    def _answer(self, jobs: list[_Job]) -> None:
        model = self.model
        try:
            if model is None:
                raise LookupError("no model")
            own = _probabilities(model.own, [job.images if job.own else None for job in jobs])
            without = _probabilities(model.none, [job.images if job.without_offset else None for job in jobs])
        except Exception as error:  # each caller gets it; the thread goes on
            for job in jobs:
                job.answer.set_exception(error)
            return
        for job, *parts in zip(jobs, own, without, strict=True):
            job.answer.set_result(Answer(model, *parts))


def _probabilities(predictor: Predictor, wanted: list[Tensor | None]) -> list[Tensor | None]:
    """Each job's probabilities, from one pass through the network; None for those that want none."""
    parts = [images for images in wanted if images is not None]
    if not parts:
        return [None] * len(wanted)
    batch = torch.cat(parts) if len(parts) > 1 else parts[0]
    found = iter(predictor(batch).softmax(dim=1).cpu().split([len(part) for part in parts]))
    return [None if images is None else next(found) for images in wanted]
