"""A site's images held in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorData:
    """Normalised images (n, C, H, W) with their labels (n)."""

    images: Tensor
    labels: Tensor

    @property
    def samples(self) -> int:
        """Number of images."""
        return len(self.labels)

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, in an order that follows from the seed; the last batch may be smaller."""
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        for start in range(0, self.samples, size):  # not order.split, which cuts an empty batch from no images
            chosen = order[start : start + size]
            yield self.images[chosen], self.labels[chosen]
