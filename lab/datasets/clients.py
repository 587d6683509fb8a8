"""Simulated clients that share one copy of an image set and hold indices into it."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torchvision.transforms.v2.functional as transforms
from torch import Tensor

from lab.datasets.image_set import ImageSet, Indices, Part
from lab.datasets.splitters import Shares
from lab.simulation.simulation import SimulatedClient
from shared.contract.plan import ImagePlan
from shared.contract.seeds import derive_seed
from shared.learning.heterogeneity import count_classes, distributional_heterogeneity
from shared.learning.methods.base import ClientRecord
from shared.learning.preprocessing import normalize

_MAX_PREPARED_BYTES = 256 << 20  # of a part, over all clients together
Negatives = Literal["auto", "always", "never"]
Shift = Literal["none", "rotated", "inverted"]


@dataclass(frozen=True)
class IndexedData:
    """One client's images of a part, as training and evaluation see them.

    If the whole part is small, the client keeps its images as the network sees them; else only their indices.
    """

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
        """Labels of the images."""
        return self.part.labels[self.indices]

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images once, in an order determined by the seed; the last batch may be smaller."""
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        for start in range(0, self.samples, size):
            places = order[start : start + size]
            images = self._seen(places) if self._prepared is None else self._prepared[places]
            yield images, self.part.labels[self.indices[places]]

    @functools.cached_property
    def _prepared(self) -> Tensor | None:
        """All images as the network sees them, to prepare them once; None if the clients' would need much memory."""
        values = len(self.part.labels) * self.image.channels * self.image.height * self.image.width
        return self._seen(torch.arange(self.samples)) if 4 * values <= _MAX_PREPARED_BYTES else None

    def _seen(self, places: Tensor) -> Tensor:
        images = self.part.images[self.indices[places]]
        return to_network(shifted(images, self.shift, self.client), self.image)


def shifted(images: Tensor, shift: Shift, client: int) -> Tensor:
    """Return uint8 images (n, C, h, w) as this client has them: rotated by quarter turns, or every other inverted."""
    if shift == "rotated":
        return images.rot90(client, (-2, -1))
    return 255 - images if shift == "inverted" and client % 2 else images


def to_network(images: Tensor, image: ImagePlan) -> Tensor:
    """uint8 (n, C, h, w) → float (n, C, H, W): bilinear without antialiasing, then normalized, as in the paper."""
    pixels = images.float() / 255
    if pixels.shape[-2:] != (image.height, image.width):
        pixels = transforms.resize(pixels, [image.height, image.width], antialias=False)
    return normalize(pixels.expand(-1, image.channels, -1, -1), image.mean, image.std).contiguous()


def make_clients(
    images: ImageSet, shares: Shares, seed: int, negatives: Negatives = "auto", shift: Shift = "none"
) -> list[SimulatedClient]:
    """Give each client its share of every class, of the training and the test images alike.

    Negatives double a client's test images: they are drawn with replacement from the test images of all other classes
    and keep their true labels. `auto` adds them if DH is 100 % and each client has one class. A shift applies to all
    images of a client.
    """
    train_parts = shares.split(images.train.labels, seed, names=images.classes)
    parts = list(zip(train_parts, shares.split(images.test.labels, seed, held_out=True), strict=True))
    labels = images.train.labels.numpy()
    counts = np.stack([count_classes(labels[train], len(images.classes)) for train, _ in parts])
    one_class_each = bool(((counts > 0).sum(axis=1) == 1).all()) and distributional_heterogeneity(counts) == 1
    wanted = negatives == "always" or (negatives == "auto" and one_class_each)
    clients = []
    for number, (name, (train_part, test_part)) in enumerate(zip(shares.sites, parts, strict=True)):
        if wanted:
            test_part = np.concatenate([test_part, _negatives(images, counts[number], len(test_part), seed, name)])
        train = IndexedData(images.train, torch.from_numpy(train_part), images.image, shift, number)
        test = IndexedData(images.test, torch.from_numpy(test_part), images.image, shift, number)
        clients.append(SimulatedClient(ClientRecord(name, tuple(counts[number].tolist())), train, test))
    return clients


def foreign_images(client: SimulatedClient, limit: int, seed: int) -> IndexedData:
    """Return test images, at most `limit`, of classes that the client does not have, shifted as its own are."""
    if not isinstance(client.test, IndexedData):
        raise TypeError("the client's images are not part of a common set")
    labels = client.test.part.labels.numpy()
    foreign = np.flatnonzero(np.asarray(client.record.class_counts)[labels] == 0)
    generator = np.random.default_rng(derive_seed(seed, "foreign", client.record.id))
    chosen = np.sort(generator.permutation(foreign)[:limit])
    return replace(client.test, indices=torch.from_numpy(chosen))


def _negatives(images: ImageSet, counts: Indices, wanted: int, seed: int, client: str) -> Indices:
    foreign = np.flatnonzero(counts[images.test.labels.numpy()] == 0)
    if not len(foreign):
        return np.empty(0, dtype=np.int64)
    return np.random.default_rng(derive_seed(seed, "negatives", client)).choice(foreign, size=wanted)
