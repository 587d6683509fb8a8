"""The model that answers: built aside, checked, then put in place by one assignment."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from client_agent.state import Bundle
from shared.methods import client_half
from shared.methods.base import Predictor
from shared.plan import FederationPlan
from shared.problems import DistransError
from shared.runtime import Runtime
from shared.wire import digest, encode


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
    )
    if not bool(model.own(torch.zeros(1, *plan.image.shape)).isfinite().all()):
        raise DistransError(f"Model {bundle.number} does not answer with finite numbers.")
    return model


class QueueFull(Exception):
    """Too many images wait already."""


@dataclass(frozen=True)
class _Job:
    images: Tensor
    use_offset: bool
    answer: "Future[tuple[ServingModel, Tensor]]"


class PredictionQueue:
    """One thread that answers for all requests, taking those that wait together through the network as one batch."""

    def __init__(self, max_waiting: int, max_batch: int, threads: int) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(max_waiting)
        self._max_batch, self._threads = max_batch, threads
        self.model: ServingModel | None = None  # replaced as a whole; a batch uses the one it began with
        self._thread = threading.Thread(target=self._run, name="predict", daemon=True)
        self._thread.start()

    def submit(self, images: Tensor, *, use_offset: bool = True) -> "Future[tuple[ServingModel, Tensor]]":
        """Probabilities (B, classes), with the model that gave them."""
        answer: Future[tuple[ServingModel, Tensor]] = Future()
        try:
            self._jobs.put_nowait(_Job(images, use_offset, answer))
        except queue.Full as error:
            raise QueueFull from error
        return answer

    def stop(self) -> None:
        """Answer what waits, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # holds for this thread: training has its own share
        while True:
            first = self._jobs.get()
            if first is None:
                return
            jobs, ending = self._gather(first)
            for use_offset in (True, False):
                self._answer([job for job in jobs if job.use_offset is use_offset], use_offset)
            if ending:
                return

    def _gather(self, first: _Job) -> tuple[list[_Job], bool]:
        jobs, images = [first], len(first.images)
        while images < self._max_batch:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
            images += len(job.images)
        return jobs, False

    def _answer(self, jobs: list[_Job], use_offset: bool) -> None:
        model = self.model
        if not jobs:
            return
        try:
            if model is None:
                raise LookupError("no model")
            predictor: Callable[[Tensor], Tensor] = model.own if use_offset else model.none
            images = torch.cat([job.images for job in jobs]) if len(jobs) > 1 else jobs[0].images
            probabilities = predictor(images).softmax(dim=1).cpu()
        except Exception as error:  # each caller gets it; the thread goes on
            for job in jobs:
                job.answer.set_exception(error)
            return
        for job, part in zip(jobs, probabilities.split([len(job.images) for job in jobs]), strict=True):
            job.answer.set_result((model, part))
