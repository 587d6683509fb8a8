"""The prediction queue: answers requests in batches, in its own threads."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from client_agent.serving.candidates import Base
from client_agent.serving.class_mix import PredictedClasses
from client_agent.serving.model import AS_SERVED, ServingModel, View
from client_agent.threads import limit_threads


class QueueFull(Exception):
    """Too many requests are already waiting."""


@dataclass(frozen=True)
class PredictionResult:
    """The probabilities (B, classes) from one model, for each requested view."""

    model: ServingModel
    probabilities: dict[View, Tensor]


@dataclass(frozen=True)
class _Job:
    images: Tensor
    views: tuple[View, ...]
    answer: "Future[PredictionResult]"


class PredictionQueue:
    """A pool of threads that decode images and run waiting requests through the network as one batch.

    The thread that decoded a request's images also runs them through the network, unless another thread is computing:
    then that thread includes them in its next batch. A lone request thus changes threads only twice.
    """

    def __init__(self, max_waiting: int, max_batch: int, threads: int) -> None:
        self._max_waiting, self._max_batch = max_waiting, max_batch
        self._lock = threading.Lock()  # never held while decoding or computing
        self._unanswered = 0
        self._ready: deque[_Job] = deque()
        self._computing = False
        self.model: ServingModel | None = None  # replaced as a whole; a batch uses the one it started with
        self.predicted = PredictedClasses()
        # One thread computes; at least one other can decode at the same time.
        self._pool = ThreadPoolExecutor(
            max(2, threads), thread_name_prefix="predict", initializer=limit_threads, initargs=(threads,)
        )

    @property
    def is_full(self) -> bool:
        """Whether `submit` would raise QueueFull now."""
        return self._unanswered >= self._max_waiting

    def submit(self, prepare: Callable[[], Tensor], *views: View) -> "Future[PredictionResult]":
        """Classify the images (B, C, H, W) that `prepare` returns in the pool; the future raises its errors.

        Without a view, the answer is what the site serves.
        """
        with self._lock:
            if self.is_full:
                raise QueueFull
            self._unanswered += 1
        answer: Future[PredictionResult] = Future()
        answer.set_running_or_notify_cancel()  # a caller that disconnects can no longer cancel it
        answer.add_done_callback(self._count_answered)
        self._pool.submit(self._handle, prepare, views or (AS_SERVED,), answer)
        return answer

    def stop(self) -> None:
        """Answer all waiting requests, then stop the threads."""
        self._pool.shutdown()

    def _count_answered(self, _answer: "Future[PredictionResult]") -> None:
        with self._lock:
            self._unanswered -= 1

    def _handle(
        self, prepare: Callable[[], Tensor], views: tuple[View, ...], answer: "Future[PredictionResult]"
    ) -> None:
        try:
            images = prepare()
        except Exception as error:  # the caller explains it
            answer.set_exception(error)
            return
        with self._lock:
            self._ready.append(_Job(images, views, answer))
            if self._computing:
                return
            self._computing = True
        while jobs := self._next_batch():
            self._answer(jobs)

    def _next_batch(self) -> list[_Job]:
        """Return the next jobs to run together; if there are none, this thread stops computing."""
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
            results = _predict(model, jobs)
        except Exception as error:  # every caller gets it; the thread continues
            for job in jobs:
                job.answer.set_exception(error)
            return
        for job, result in zip(jobs, results, strict=True):
            job.answer.set_result(PredictionResult(model, result))
        for job, result in zip(jobs, results, strict=True):
            self.predicted.add(result[job.views[0]].argmax(dim=1).tolist())


def _predict(model: ServingModel, jobs: list[_Job]) -> list[dict[View, Tensor]]:
    """Return each job's probabilities, from a single pass of each base model over the jobs that need it."""
    needed = [{member.base for view in job.views for member, _ in model.members(view)} for job in jobs]
    logits: list[dict[Base, Tensor]] = [{} for _ in jobs]
    for base, predictor in model.predictors.items():
        places = [place for place, bases in enumerate(needed) if base in bases]
        if places:
            parts = [jobs[place].images for place in places]
            batch = torch.cat(parts) if len(parts) > 1 else parts[0]
            found = predictor(batch).cpu().split([len(part) for part in parts])
            for place, values in zip(places, found, strict=True):
                logits[place][base] = values
    return [{view: model.mix(values, view) for view in job.views} for job, values in zip(jobs, logits, strict=True)]
