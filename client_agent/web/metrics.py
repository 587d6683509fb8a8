"""The web service's Prometheus metrics."""

from collections.abc import Iterable, Sequence

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from client_agent.serving.class_mix import PredictedClasses
from client_agent.serving.model import ServingModel


class Metrics:
    """Metrics since the start of the process."""

    def __init__(self, predicted: PredictedClasses, classes: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ClassCounts(predicted, classes))
        self.images = Counter("distrans_agent_images", "Images classified.", registry=self._registry)
        self.refused = Counter(
            "distrans_agent_refused", "Requests refused because the queue was full.", registry=self._registry
        )
        self.latency = Histogram(
            "distrans_agent_predict_seconds", "Duration of a prediction request in seconds.", registry=self._registry
        )
        self._model = Gauge(
            "distrans_agent_model", "Number of the served model; -1 if there is none.", registry=self._registry
        )

    def response(self, model: ServingModel | None) -> Response:
        """Return the metrics in Prometheus' text format."""
        self._model.set(-1 if model is None else model.key.number)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _ClassCounts(Collector):
    def __init__(self, predicted: PredictedClasses, classes: Sequence[str]) -> None:
        self._predicted, self._classes = predicted, classes

    @override
    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily("distrans_agent_predicted", "Images by predicted class.", labels=["class"])
        for place, count in sorted(self._predicted.since_start().items()):
            family.add_metric([self._classes[place]], count)
        yield family
