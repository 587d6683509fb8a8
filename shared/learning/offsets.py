"""A client's initial offset, and how far an offset has moved from it."""

import math

import torch
from torch import Tensor

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan
from shared.contract.seeds import derive_seed
from shared.learning.preprocessing import IMAGENET_MEAN, IMAGENET_STD, normalize


def initial_offset(plan: FederationPlan, options: DistransOptions, client_id: str) -> Tensor:
    """Return the client's t⁰ (C, H, W), which depends only on the plan and the client's id.

    `auto` and `generator` get the pixels of `uniform`, which the aggregation network may replace.
    """
    owner = "everyone" if options.shared_offset else f"client:{client_id}"
    generator = torch.Generator().manual_seed(derive_seed(plan.seed, "offset", owner))
    shape = plan.image.shape
    if options.offset_init == "zeros":
        return torch.zeros(shape)
    if options.offset_init == "normal":
        return torch.randn(shape, generator=generator)
    pixels = torch.rand(shape, generator=generator)
    if options.offset_init == "imagenet":
        return normalize(pixels, IMAGENET_MEAN, IMAGENET_STD)
    return normalize(pixels, plan.image.mean, plan.image.std)


def relative_motion(offset: Tensor, start: Tensor) -> float:
    """Return ‖t − t⁰‖ / ‖t⁰‖; if t⁰ = 0, divide by the norm of all ones, about a normalized image's."""
    length = float(start.double().norm()) or math.sqrt(start.numel())
    return float((offset.double() - start.double()).norm()) / length
