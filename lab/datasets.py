"""Data for experiments, cut into clients."""

import sklearn.model_selection
import torch
from torch import Tensor

from client_agent.sources import digit_images
from lab.simulation import SimulatedClient
from shared.heterogeneity import Shares, count_classes
from shared.methods.base import ClientRecord
from shared.offsets import normalise
from shared.plan import ImagePlan
from shared.tensor_data import TensorData

DIGIT_CLASSES = tuple(str(digit) for digit in range(10))


def load_digits(image: ImagePlan, seed: int = 0) -> tuple[TensorData, TensorData]:
    """scikit-learn's 1,797 handwritten digits, resized and normalised for the plan: (three quarters, one quarter)."""
    images, labels = digit_images()
    images = torch.nn.functional.interpolate(images, size=(image.height, image.width), mode="bilinear")
    images = normalise(images.expand(-1, image.channels, -1, -1), image.mean, image.std)
    train, test = sklearn.model_selection.train_test_split(
        range(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    return _pick(images, labels, train), _pick(images, labels, test)


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


def _pick(images: Tensor, labels: Tensor, indices: list[int]) -> TensorData:
    chosen = torch.tensor(indices, dtype=torch.int64)
    return TensorData(images[chosen], labels[chosen])
