"""A set of images held once, as bytes; simulated clients hold indices into it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torchvision.transforms.v2.functional as transforms
from numpy.typing import NDArray
from torch import Tensor

from shared.offsets import normalise
from shared.plan import ImagePlan

Indices = NDArray[np.int64]
Shift = Literal["none", "rotated", "inverted"]
_CHUNK = 1024


@dataclass(frozen=True)
class Pictures:
    """One part of a set on the disk: all labels, and the images of any of them on demand."""

    labels: Indices
    read: Callable[[Indices], Tensor]  # indices → uint8 (n, C, H, W)


@dataclass(frozen=True)
class Source:
    """A set on the disk, listed but not yet decoded."""

    classes: tuple[str, ...]
    train: Pictures
    test: Pictures


@dataclass(frozen=True)
class Part:
    """Decoded images (n, C, H, W) as uint8, with their labels (n)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ImageSet:
    """A set in memory. `image` is what a network sees: batches are resized to it and normalised as they are drawn."""

    classes: tuple[str, ...]
    image: ImagePlan
    train: Part
    test: Part


@dataclass(frozen=True)
class IndexedData:
    """Some images of a part, as training and evaluation at one client see them; a few bytes an image."""

    part: Part
    indices: Tensor
    image: ImagePlan
    shift: Shift = "none"
    client: int = 0

    @property
    def samples(self) -> int:
        """Number of images."""
        return len(self.indices)

    @property
    def labels(self) -> Tensor:
        """Their labels."""
        return self.part.labels[self.indices]

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, in an order that follows from the seed; the last batch may be smaller."""
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        for start in range(0, self.samples, size):
            chosen = self.indices[order[start : start + size]]
            seen = shifted(self.part.images[chosen], self.shift, self.client)
            yield to_network(seen, self.image), self.part.labels[chosen]


def shifted(images: Tensor, shift: Shift, client: int) -> Tensor:
    """uint8 (n, C, h, w) as the client with this number has them: turned by quarters, or every other one's negative."""
    if shift == "rotated":
        return images.rot90(client, (-2, -1))
    return 255 - images if shift == "inverted" and client % 2 else images


def to_network(images: Tensor, image: ImagePlan) -> Tensor:
    """uint8 (n, C, h, w) → float (n, C, H, W): bilinear without antialiasing, then normalised, as the paper's code."""
    pixels = images.float() / 255
    if pixels.shape[-2:] != (image.height, image.width):
        pixels = transforms.resize(pixels, [image.height, image.width], antialias=False)
    return normalise(pixels.expand(-1, image.channels, -1, -1), image.mean, image.std).contiguous()


def shrink(images: Tensor, image: ImagePlan) -> Tensor:
    """The images at the network's size where that is the smaller one, rounded to bytes; else as they are."""
    height, width = images.shape[-2:]
    if height * width <= image.height * image.width:
        return images
    pieces = [
        (transforms.resize(chunk.float(), [image.height, image.width], antialias=False)).round().to(torch.uint8)
        for chunk in images.split(_CHUNK)
    ]
    return torch.cat(pieces) if pieces else images
