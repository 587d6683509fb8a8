"""From a request with images to probabilities: the limits, the queue and the metrics of `/predict` and the page."""

import time
from functools import partial
from http import HTTPStatus

from fastapi import Request

from client_agent.serving.model import View
from client_agent.serving.queue import PredictionQueue, PredictionResult, QueueFull
from client_agent.settings import ServeOptions
from client_agent.web.limits import HeldBodies
from client_agent.web.metrics import Metrics
from client_agent.web.problems import ProblemError
from client_agent.web.requests import check_headers, prepare_images, read_images
from shared.contract.plan import ImagePlan


class PredictionDesk:
    """Takes images, and gives the probabilities that the queue computes. For the event loop only."""

    def __init__(self, shape: ImagePlan, predictions: PredictionQueue, options: ServeOptions, metrics: Metrics) -> None:
        self._shape, self._predictions, self._options, self._metrics = shape, predictions, options, metrics
        self._bodies = HeldBodies(options)

    async def answer(self, request: Request, *views: View) -> PredictionResult:
        """Return the probabilities of the request's images for each view; raise ProblemError if it is refused.

        Whatever the headers rule out is refused before the body is read.
        """
        started = time.perf_counter()
        if self._predictions.model is None:
            raise no_model()
        if self._predictions.is_full:
            self._metrics.refused.inc()
            raise _queue_full()
        kind = check_headers(request, self._options)
        with self._bodies.hold() as body:
            async with self._bodies.receive(request, body) as pieces:
                files = await read_images(kind, request.headers, pieces, self._options)
            prepare = partial(prepare_images, files, self._shape, self._options)
            try:
                result = await self._predictions.predict(prepare, *views, size_bytes=body.held_bytes)
            except QueueFull as error:  # it filled up while the body arrived
                self._metrics.refused.inc()
                raise _queue_full() from error
        self._metrics.images.inc(len(files))
        self._metrics.latency.observe(time.perf_counter() - started)
        return result


def no_model() -> ProblemError:
    """Return the problem of an agent that cannot answer yet."""
    return ProblemError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "no-model",
        "There is no model yet.",
        "Try again after the first round.",
        {"Retry-After": "10"},
    )


def _queue_full() -> ProblemError:
    return ProblemError(
        HTTPStatus.TOO_MANY_REQUESTS,
        "queue-full",
        "Too many requests are waiting for an answer.",
        "Send fewer requests at once.",
        {"Retry-After": "1"},
    )
