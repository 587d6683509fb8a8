"""The prediction queue: answers requests in batches, in its own threads."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from client_agent.serving.candidates import Base
from client_agent.serving.class_mix import PredictedClasses
from client_agent.serving.model import AS_SERVED, ServingModel, View
from client_agent.threads import limit_threads

_SMALL_BYTES = 64 * 1024  # as a rule decoded within a few milliseconds
# On a CPU, larger batches save next to nothing per image, and the callers of a smaller one can be answered, and send
# their next images, while the other ones are computed.
_CPU_BATCH = 12


def batch_size(device_type: str, largest: int) -> int:
    """Return how many images to run through the network at once."""
    return min(_CPU_BATCH, largest) if device_type == "cpu" else largest


class QueueFull(Exception):
    """Too many requests are already waiting."""


@dataclass(frozen=True)
class PredictionResult:
    """The probabilities (B, classes) from one model, for each requested view."""

    model: ServingModel
    probabilities: dict[View, Tensor]


Answer = Future[PredictionResult] | asyncio.Future[PredictionResult]
_Outcome = PredictionResult | Exception


@dataclass(frozen=True)
class _Request:
    prepare: Callable[[], Tensor]
    views: tuple[View, ...]
    answer: Answer


@dataclass(frozen=True)
class _Job:
    images: Tensor
    views: tuple[View, ...]
    answer: Answer


class PredictionQueue:
    """A pool of threads that decode images and run waiting requests through the network as one batch.

    One thread at a time leads: it decodes the small requests that wait, runs them through the network together with
    the large ones that others have decoded, and repeats this until nothing is left. Nothing ever waits for a batch to
    fill up. Small requests need no second thread: Python runs one at a time, and taking turns costs more than decoding
    them. The callers in an event loop are woken up once per batch for the same reason.
    """

    def __init__(self, max_waiting: int, max_batch: int, threads: int) -> None:
        self._max_waiting, self._max_batch = max_waiting, max_batch
        self._lock = threading.Lock()  # never held while decoding or computing; guards everything up to _leads
        self._unanswered = 0
        self._small: deque[_Request] = deque()
        self._large: deque[_Request] = deque()
        self._ready: deque[_Job] = deque()
        self._idle = max(2, threads)  # one thread leads; at least one other can decode at the same time
        self._leads = False  # whether a thread does
        self.model: ServingModel | None = None  # replaced as a whole; a batch uses the one it started with
        self.predicted = PredictedClasses()
        self._pool = ThreadPoolExecutor(
            self._idle, thread_name_prefix="predict", initializer=limit_threads, initargs=(threads,)
        )

    @property
    def is_full(self) -> bool:
        """Whether a request would raise QueueFull now."""
        return self._unanswered >= self._max_waiting

    def submit(self, prepare: Callable[[], Tensor], *views: View, size_bytes: int = 0) -> "Future[PredictionResult]":
        """Classify the images (B, C, H, W) that `prepare` returns in the pool; the future raises its errors.

        Without a view, the answer is what the site serves. Raises QueueFull.
        """
        answer: Future[PredictionResult] = Future()
        answer.set_running_or_notify_cancel()  # a caller that disconnects can no longer cancel it
        self._enqueue(_Request(prepare, views or (AS_SERVED,), answer), size_bytes)
        return answer

    async def predict(self, prepare: Callable[[], Tensor], *views: View, size_bytes: int = 0) -> PredictionResult:
        """Do the same as `submit` for a caller in an event loop."""
        answer: asyncio.Future[PredictionResult] = asyncio.get_running_loop().create_future()
        self._enqueue(_Request(prepare, views or (AS_SERVED,), answer), size_bytes)
        return await answer

    def stop(self) -> None:
        """Answer all waiting requests, then stop the threads."""
        self._pool.shutdown()

    def _enqueue(self, request: _Request, size_bytes: int) -> None:
        is_small = size_bytes <= _SMALL_BYTES
        with self._lock:
            if self.is_full:
                raise QueueFull
            self._unanswered += 1
            (self._small if is_small else self._large).append(request)
            # Busy threads look for more before they rest, and the one that leads takes small requests itself.
            if not self._idle or (is_small and self._leads):
                return
            self._idle -= 1
            self._leads = self._leads or is_small
        self._pool.submit(self._work, is_small)

    def _work(self, leads: bool) -> None:
        """Do what there is to do, then return: lead if no other thread does, else decode large requests."""
        while True:
            with self._lock:
                if leads or not self._leads:  # nobody leads without work for it, or while decoding a large request
                    self._leads = leads = bool(self._small or self._ready)
                request = self._next_request(leads)
                jobs = self._next_batch() if leads and request is None else []
                if request is None and not jobs:
                    self._idle += 1
                    return
            if request is not None:
                self._decode(request)
            else:
                self._answer(jobs)

    def _next_request(self, leads: bool) -> _Request | None:
        """Return the next request to decode; the thread that leads decodes small ones until a batch is full."""
        if not leads:
            return self._large.popleft() if self._large else None
        is_batch_full = sum(len(job.images) for job in self._ready) >= self._max_batch
        return self._small.popleft() if self._small and not is_batch_full else None

    def _next_batch(self) -> list[_Job]:
        """Return the next jobs to run together."""
        jobs: list[_Job] = []
        images = 0
        while self._ready and images < self._max_batch:
            jobs.append(self._ready.popleft())
            images += len(jobs[-1].images)
        return jobs

    def _decode(self, request: _Request) -> None:
        try:
            images = request.prepare()
        except Exception as error:  # the caller explains it
            self._deliver([(request.answer, error)])
            return
        with self._lock:
            self._ready.append(_Job(images, request.views, request.answer))

    def _answer(self, jobs: list[_Job]) -> None:
        model = self.model
        try:
            if model is None:
                raise LookupError("no model")
            results: list[_Outcome] = [PredictionResult(model, found) for found in _predict(model, jobs)]
        except Exception as error:  # every caller gets it; the thread continues
            results = [error] * len(jobs)
        self._deliver([(job.answer, result) for job, result in zip(jobs, results, strict=True)])
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, PredictionResult):
                self.predicted.add(result.probabilities[job.views[0]].argmax(dim=1).tolist())

    def _deliver(self, outcomes: list[tuple[Answer, _Outcome]]) -> None:
        """Answer the callers, with a single call into each event loop."""
        with self._lock:
            self._unanswered -= len(outcomes)
        in_loops: dict[asyncio.AbstractEventLoop, list[tuple[Answer, _Outcome]]] = {}
        for answer, outcome in outcomes:
            if isinstance(answer, Future):
                _settle(answer, outcome)
            else:
                in_loops.setdefault(answer.get_loop(), []).append((answer, outcome))
        for loop, settled in in_loops.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle_all, settled)


def _settle_all(outcomes: list[tuple[Answer, _Outcome]]) -> None:
    for answer, outcome in outcomes:
        if not answer.done():  # its caller's task may have been cancelled
            _settle(answer, outcome)


def _settle(answer: Answer, outcome: _Outcome) -> None:
    if isinstance(outcome, PredictionResult):
        answer.set_result(outcome)
    else:
        answer.set_exception(outcome)


def _predict(model: ServingModel, jobs: list[_Job]) -> list[dict[View, Tensor]]:
    """Return each job's probabilities, from a single pass of each base model over the jobs that need it."""
    needed = [{member.base for view in job.views for member, _ in model.members(view)} for job in jobs]
    sizes = [len(job.images) for job in jobs]
    logits: dict[Base, tuple[list[int], Tensor]] = {}
    for base, predictor in model.predictors.items():
        places = [place for place, bases in enumerate(needed) if base in bases]
        if places:
            parts = [jobs[place].images for place in places]
            logits[base] = places, predictor(torch.cat(parts) if len(parts) > 1 else parts[0]).cpu()
    found: list[dict[View, Tensor]] = [{} for _ in jobs]
    for view in dict.fromkeys(view for job in jobs for view in job.views):
        wanting = [place for place, job in enumerate(jobs) if view in job.views]
        values = {member.base: _rows(*logits[member.base], wanting, sizes) for member, _ in model.members(view)}
        parts = model.mix(values, view).split([sizes[place] for place in wanting])
        for place, part in zip(wanting, parts, strict=True):
            found[place][view] = part
    return [{view: views[view] for view in job.views} for job, views in zip(jobs, found, strict=True)]


def _rows(places: list[int], rows: Tensor, wanted: list[int], sizes: list[int]) -> Tensor:
    """Return the rows of the wanted jobs, out of those of the jobs at these places."""
    if places == wanted:
        return rows
    parts = dict(zip(places, rows.split([sizes[place] for place in places]), strict=True))
    return torch.cat([parts[place] for place in wanted])
