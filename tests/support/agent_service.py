"""The agent's web service with a small model, inside the test process."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi.testclient import TestClient
from PIL import Image
from support.halves import server_half

from client_agent.serving.candidates import Base
from client_agent.serving.model import ServingModel, build
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import ServeOptions
from client_agent.state.kept_models import Bundle
from client_agent.web.app import create_app
from client_agent.web.site import Site
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.methods.base import ClientRecord, Predictor, RoundContext
from shared.learning.runtime import Runtime
from shared.tensors.wire import digest, encode

PLAN = validate_plan(
    {
        "name": "pets",
        "classes": ["cat", "dog", "eel", "fox"],
        "image": {"channels": 1, "height": 16, "width": 16},
        "method": {"name": "distrans", "offset_aggregation": "none"},
    }
)


def bundle(number: int = 3, plan: FederationPlan = PLAN) -> Bundle:
    """Return a model whose random weights and offset depend on its number."""
    half = server_half(plan.model_copy(update={"seed": number}))
    state = half.initial_state()
    me = ClientRecord(f"site {number}", (1, 1, 1, 1))
    facts = half.facts([me])
    personal = half.personal(state, me, RoundContext([me], facts))
    return Bundle(number, digest(encode(state.shared)), state.shared, personal, {}, facts)


def image(seed: int = 0, kind: str = "PNG", size: tuple[int, int] = (20, 20)) -> bytes:
    """Return an encoded image of random noise."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def serving(predictor: Predictor) -> ServingModel:
    """Return a served model that answers with this predictor, with or without the offset."""
    predictors = dict.fromkeys((Base.OFFSET, Base.GLOBAL), predictor)
    return replace(build(PLAN, "site", bundle(), Runtime()), predictors=predictors)


class Service:
    """The web service without a socket; `http` calls it at its usual address."""

    def __init__(self, options: ServeOptions, model: Bundle | None, site: Site | None = None) -> None:
        self.queue = PredictionQueue(options.queue, options.max_images, threads=1)
        if model is not None:
            self.queue.model = build(PLAN, "site", model, Runtime())
        self.app = create_app(PLAN, self.queue, options, site or Site(lambda: {"agent": "me"}))
        self.http: Any = TestClient(self.app, base_url="http://127.0.0.1")

    def predict(self, content: bytes | None = None, kind: str = "image/png", **options: Any) -> Any:
        """Post a raw body to /predict."""
        return self.http.post("/predict", content=content, headers={"content-type": kind}, **options)
