"""Images in memory and on disk: what a loader returns, and what simulated clients share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.contract.plan import ImagePlan

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class LazyImages:
    """The training or test part of a data set on disk: all labels, and images on demand."""

    labels: Indices
    read: Callable[[Indices], Tensor]  # indices → uint8 (n, C, H, W)


@dataclass(frozen=True)
class Source:
    """A data set on disk, listed but not yet decoded."""

    classes: tuple[str, ...]
    train: LazyImages
    test: LazyImages


@dataclass(frozen=True)
class Part:
    """Decoded images (n, C, H, W) as uint8, with their labels (n)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory. `image` is the network's input: batches are resized and normalized as they are drawn."""

    classes: tuple[str, ...]
    image: ImagePlan
    train: Part
    test: Part
