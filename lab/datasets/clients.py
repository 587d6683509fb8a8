"""From a set of images and a split to simulated clients."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lab.datasets.image_set import ImageSet, IndexedData, Shift
from lab.simulation import SimulatedClient
from shared.heterogeneity import Shares, count_classes, distributional_heterogeneity
from shared.methods.base import ClientRecord
from shared.seeds import derive_seed
from shared.tensor_data import TensorData

Negatives = Literal["auto", "always", "never"]


def make_clients(train: TensorData, test: TensorData, shares: Shares, seed: int) -> list[SimulatedClient]:
    """Clients that hold their shares of every class, of the training and of the test images alike.

    Of small classes, or of all of them, a client may have no test image.
    """
    clients = []
    parts = zip(shares.split(train.labels, seed), shares.split(test.labels, seed, held_out=True), strict=True)
    for number, (train_part, test_part) in enumerate(parts):
        chosen, held_out = torch.from_numpy(train_part), torch.from_numpy(test_part)
        data = TensorData(train.images[chosen], train.labels[chosen])
        tests = TensorData(test.images[held_out], test.labels[held_out])
        clients.append(SimulatedClient(_record(number, data.labels, shares), data, tests))
    return clients


def make_indexed_clients(
    images: ImageSet, shares: Shares, seed: int, negatives: Negatives = "auto", shift: Shift = "none"
) -> list[SimulatedClient]:
    """The same for a set that is held once.

    `auto` adds negatives where DH is 100 % and each client has one class: to each client's test images as many again,
    drawn with replacement from the test images of all other classes, which keep their true labels. All images of a
    client are shifted alike.
    """
    train_parts = shares.split(images.train.labels, seed, names=images.classes)
    parts = list(zip(train_parts, shares.split(images.test.labels, seed, held_out=True), strict=True))
    labels = images.train.labels.numpy()
    counts = np.stack([count_classes(labels[train], len(images.classes)) for train, _ in parts])
    alone = bool(((counts > 0).sum(axis=1) == 1).all()) and distributional_heterogeneity(counts) == 1
    wanted = negatives == "always" or (negatives == "auto" and alone)
    clients = []
    for number, (train_part, test_part) in enumerate(parts):
        train = IndexedData(images.train, torch.from_numpy(train_part), images.image, shift, number)
        record = _record(number, train.labels, shares)
        if wanted:
            test_part = np.concatenate([test_part, _negatives(images, counts[number], len(test_part), seed, record.id)])
        test = IndexedData(images.test, torch.from_numpy(test_part), images.image, shift, number)
        clients.append(SimulatedClient(record, train, test))
    return clients


def _negatives(
    images: ImageSet, counts: np.ndarray[tuple[int], np.dtype[np.int64]], wanted: int, seed: int, client: str
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    foreign = np.flatnonzero(counts[images.test.labels.numpy()] == 0)
    if not len(foreign):
        return np.empty(0, dtype=np.int64)
    return np.random.default_rng(derive_seed(seed, "negatives", client)).choice(foreign, size=wanted)


def _record(number: int, labels: Tensor, shares: Shares) -> ClientRecord:
    clients, classes = shares.values.shape
    width = max(3, len(str(clients)))
    return ClientRecord(f"site-{number + 1:0{width}}", tuple(int(count) for count in count_classes(labels, classes)))
