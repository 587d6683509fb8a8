"""A client's initial offset, and how far an offset has moved from it."""

import math
from typing import TYPE_CHECKING

import numpy as np

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan
from shared.contract.seeds import derive_seed
from shared.learning.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from shared.tensors.arrays import Array, as_array

if TYPE_CHECKING:
    from torch import Tensor


def initial_offset(plan: FederationPlan, options: DistransOptions, client_id: str) -> Array:
    """Return the client's t⁰ (C, H, W), which depends only on the plan and the client's id.

    `auto` and `generator` get the pixels of `uniform`, which the aggregation network may replace. Only `normal` needs
    torch.
    """
    owner = "everyone" if options.shared_offset else f"client:{client_id}"
    seed, shape = derive_seed(plan.seed, "offset", owner), plan.image.shape
    if options.offset_init == "zeros":
        return np.zeros(shape, np.float32)
    if options.offset_init == "normal":
        import torch

        return as_array(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    mean, std = (
        (IMAGENET_MEAN, IMAGENET_STD) if options.offset_init == "imagenet" else (plan.image.mean, plan.image.std)
    )
    return (_uniform(shape, seed) - _per_channel(mean)) / _per_channel(std)


def _uniform(shape: tuple[int, ...], seed: int) -> Array:
    """Return what `torch.rand` draws on the CPU from a generator with this seed, of which it uses 32 bits."""
    draws = np.random.RandomState(seed & 0xFFFFFFFF).bytes(4 * math.prod(shape))
    bits = np.frombuffer(draws, "<u4") & 0xFFFFFF  # as many as a float32 has
    return (bits.astype(np.float32) * np.float32(2**-24)).reshape(shape)


def _per_channel(values: tuple[float, ...]) -> Array:
    return np.array(values, np.float32).reshape(-1, 1, 1)


def relative_motion(offset: "Tensor", start: "Tensor") -> float:
    """Return ‖t − t⁰‖ / ‖t⁰‖; if t⁰ = 0, divide by the norm of all ones, about a normalized image's."""
    length = float(start.double().norm()) or math.sqrt(start.numel())
    return float((offset.double() - start.double()).norm()) / length
