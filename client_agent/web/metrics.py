"""The web service's Prometheus metrics."""

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from client_agent.serving.model import ServingModel


class Metrics:
    """Metrics since the start of the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
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
