"""Images held in memory as normalized tensors, and simulated clients that hold them."""

from collections.abc import Iterator
from dataclasses import dataclass

import sklearn.model_selection
import torch
from torch import Tensor

from client_agent.data.sources import digit_images
from lab.datasets.splitters import Shares
from lab.simulation.simulation import SimulatedClient
from shared.contract.plan import ImagePlan
from shared.learning.heterogeneity import count_classes
from shared.learning.methods.base import ClientRecord
from shared.learning.preprocessing import normalize


@dataclass(frozen=True)
class TensorData:
    """Normalized images (n, C, H, W) with their labels (n)."""

    images: Tensor
    labels: Tensor

    @property
    def samples(self) -> int:
        """Number of images."""
        return len(self.labels)

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images once, in an order determined by the seed; the last batch may be smaller."""
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        for start in range(0, self.samples, size):  # not order.split, which yields one empty batch for no images
            chosen = order[start : start + size]
            yield self.images[chosen], self.labels[chosen]


def load_digits(image: ImagePlan, seed: int = 0) -> tuple[TensorData, TensorData]:
    """Return all digits, resized and normalized for the plan: (three quarters, one quarter)."""
    images, labels = digit_images()
    images = torch.nn.functional.interpolate(images, size=(image.height, image.width), mode="bilinear")
    images = normalize(images.expand(-1, image.channels, -1, -1), image.mean, image.std)
    train, test = sklearn.model_selection.train_test_split(
        range(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    return TensorData(images[train], labels[train]), TensorData(images[test], labels[test])


def share_out(train: TensorData, test: TensorData, shares: Shares, seed: int) -> list[SimulatedClient]:
    """Return clients that hold their shares of every class, of the training and the test images alike."""
    clients = []
    parts = zip(shares.split(train.labels, seed), shares.split(test.labels, seed, held_out=True), strict=True)
    for name, (train_part, test_part) in zip(shares.sites, parts, strict=True):
        data = TensorData(train.images[train_part], train.labels[train_part])
        tests = TensorData(test.images[test_part], test.labels[test_part])
        counts = count_classes(data.labels, shares.values.shape[1])
        clients.append(SimulatedClient(ClientRecord(name, tuple(counts.tolist())), data, tests))
    return clients
