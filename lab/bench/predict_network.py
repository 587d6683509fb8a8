"""What `bench predict` serves on every side: a network with random weights, an image, and how it is decoded."""

import io
from typing import Literal

import numpy as np
from PIL import Image
from torch import Tensor

from client_agent.data.images import PREDICT_FORMATS, decode, to_tensor
from client_agent.serving.baseline import LocalBaseline
from client_agent.serving.candidates import BLEND, Base, Candidate, as_trained, blended_members
from client_agent.serving.model import Recipe, ServingModel, build
from client_agent.state.kept_models import Bundle
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.methods import server_half
from shared.learning.methods.base import ClientRecord, RoundContext
from shared.learning.methods.tensor_half import TensorHalf
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors
from shared.tensors.wire import digest, encode

Served = Literal["offset", "blend"]
_BASES = (Base.GLOBAL, Base.OFFSET, Base.ADAPTED, Base.ALONE)
_TEMPERATURE = 1.3  # any but 1, which would leave out a step


def bench_plan(backbone: str) -> FederationPlan:
    """Return a plan with the default preset."""
    return validate_plan(
        {
            "name": "bench",
            "classes": [str(label) for label in range(10)],
            "model": {"backbone": backbone, "activation": "relu"},
            "method": {"name": "distrans", "offset_aggregation": "none"},
        }
    )


def bench_model(plan: FederationPlan, served: Served) -> ServingModel:
    """Return the model with its offset, or a blend of all base models; every client has as many images per class."""
    half, counts = TensorHalf(server_half(plan)), (10,) * len(plan.classes)
    me, other = ClientRecord("bench", counts), ClientRecord("other", counts)
    state, facts = half.initial_state(), half.facts([me, other])
    personal = half.personal(state, me, RoundContext([me, other], facts))
    bundle = Bundle(1, digest(encode(state.shared)), state.shared, personal, {}, facts)
    if served == "offset":
        recipe = Recipe(as_trained([Base.GLOBAL, Base.OFFSET], has_prior=True), _TEMPERATURE, counts)
    else:
        members = blended_members(_BASES, has_prior=True)
        blend = Candidate(BLEND, tuple((member, 1 / len(members)) for member in members), "logits")
        weights: dict[str, Tensors] = {Base.ADAPTED: state.shared, Base.ALONE: LocalBaseline(plan, me.id).start()}
        recipe = Recipe(blend, _TEMPERATURE, counts, weights)
    return build(plan, me.id, bundle, Runtime(), recipe)


def decode_image(data: bytes, plan: FederationPlan) -> Tensor:
    """Return an image as (C, H, W)."""
    return to_tensor(decode(data, PREDICT_FORMATS), plan.image)


def bench_image() -> bytes:
    """Return a PNG of 64×64 random pixels, which takes longer to decode than a photo of that size."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
