"""Data for experiments, cut into clients."""

from collections.abc import Sequence

import sklearn.datasets
import sklearn.model_selection
import torch
from torch import Tensor

from lab.simulation import SimulatedClient
from shared.heterogeneity import Shares, count_classes
from shared.methods.base import ClientRecord
from shared.offsets import normalise
from shared.plan import ImagePlan
from shared.seeds import derive_seed
from shared.tensor_data import TensorData

DIGIT_CLASSES = tuple(str(digit) for digit in range(10))


def load_digits(image: ImagePlan, seed: int = 0) -> tuple[TensorData, TensorData]:
    """scikit-learn's 1,797 handwritten digits, resized and normalised for the plan: (three quarters, one quarter)."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = torch.nn.functional.interpolate(images, size=(image.height, image.width), mode="bilinear")
    images = normalise(images.expand(-1, image.channels, -1, -1), image.mean, image.std)
    train, test = sklearn.model_selection.train_test_split(
        range(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    targets = torch.tensor(labels, dtype=torch.int64)
    return _pick(images, targets, train), _pick(images, targets, test)


def make_clients(train: TensorData, test: TensorData, shares: Shares, seed: int) -> list[SimulatedClient]:
    """Clients that hold their shares of every class, of the training and of the test images alike."""
    classes = shares.values.shape[1]
    clients = []
    parts = zip(shares.split(train.labels, seed), shares.split(test.labels, seed), strict=True)
    for number, (train_part, test_part) in enumerate(parts):
        data = _pick(train.images, train.labels, train_part.tolist())
        counts = count_classes(data.labels, classes)
        record = ClientRecord(f"site-{number + 1:03}", tuple(int(count) for count in counts))
        clients.append(SimulatedClient(record, data, _pick(test.images, test.labels, test_part.tolist())))
    return clients


def add_negatives(clients: Sequence[SimulatedClient], test: TensorData, seed: int = 2021) -> list[SimulatedClient]:
    """Clients that are also tested on as many images of other classes as of their own, drawn with replacement.

    This is the paper's evaluation where classes are not shared: an answer that is always one's own class scores half.
    The images keep their true labels; evaluation counts them apart.
    """
    extended = []
    for number, client in enumerate(clients):
        others = torch.nonzero(~torch.isin(test.labels, torch.tensor(sorted(client.own_classes))))[:, 0]
        wanted = client.test.samples if len(others) else 0
        generator = torch.Generator().manual_seed(derive_seed(seed, "negatives", number))
        drawn = others[torch.randint(max(len(others), 1), (wanted,), generator=generator)]
        parts = [*client.test.batches(max(wanted, 1), seed=0), (test.images[drawn], test.labels[drawn])]
        both = TensorData(torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts]))
        extended.append(SimulatedClient(client.record, client.train, both, dict(client.private)))
    return extended


def _pick(images: Tensor, labels: Tensor, indices: list[int]) -> TensorData:
    chosen = torch.tensor(indices, dtype=torch.int64)
    return TensorData(images[chosen], labels[chosen])
