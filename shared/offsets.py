"""The first offset of a client, and how far an offset has moved from it."""

import math

import torch
from torch import Tensor

from shared.method_options import DistransOptions
from shared.plan import FederationPlan
from shared.seeds import derive_seed

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalise(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(… , C, H, W) in [0, 1] → (pixels − mean) / std, per channel."""
    return (pixels - torch.tensor(mean).reshape(-1, 1, 1)) / torch.tensor(std).reshape(-1, 1, 1)


def initial_offset(plan: FederationPlan, options: DistransOptions, client_id: str) -> Tensor:
    """The client's t⁰ (C, H, W), a function of the plan's seed and the client's id alone."""
    owner = "everyone" if options.shared_offset else f"client:{client_id}"
    generator = torch.Generator().manual_seed(derive_seed(plan.seed, "offset", owner))
    shape = plan.image.shape
    if options.offset_init == "zeros":
        return torch.zeros(shape)
    if options.offset_init == "normal":
        return torch.randn(shape, generator=generator)
    pixels = torch.rand(shape, generator=generator)
    if options.offset_init == "imagenet":
        return normalise(pixels, _IMAGENET_MEAN, _IMAGENET_STD)
    return normalise(pixels, plan.image.mean, plan.image.std)


def relative_motion(offset: Tensor, start: Tensor) -> float:
    """‖t − t⁰‖ / ‖t⁰‖; where t⁰ is zero, over the norm of an offset of ones, about that of a normalised image."""
    length = float(start.double().norm()) or math.sqrt(start.numel())
    return float((offset.double() - start.double()).norm()) / length
