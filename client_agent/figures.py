"""The web service's figures for Prometheus."""

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from client_agent.serving import ServingModel


class Figures:
    """Counted from the start of the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.images = Counter("distrans_agent_images", "Images classified.", registry=self._registry)
        self.refused = Counter("distrans_agent_refused", "Requests refused, queue full.", registry=self._registry)
        self.latency = Histogram("distrans_agent_predict_seconds", "Time of a request.", registry=self._registry)
        self._model = Gauge("distrans_agent_model", "Number of the model served; -1: none.", registry=self._registry)

    def response(self, model: ServingModel | None) -> Response:
        """In Prometheus' text format."""
        self._model.set(-1 if model is None else model.number)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
