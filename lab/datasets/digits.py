"""scikit-learn's 1,797 handwritten digits, which need no download."""

from pathlib import Path

import numpy as np
import sklearn.datasets
import sklearn.model_selection
import torch
from torch import Tensor

from lab.datasets.image_set import Indices, Pictures, Source
from shared.offsets import normalise
from shared.plan import ImagePlan
from shared.tensor_data import TensorData

DIGIT_CLASSES = tuple(str(digit) for digit in range(10))
_WHITE = 16


def load_digits(image: ImagePlan, seed: int = 0) -> tuple[TensorData, TensorData]:
    """All digits resized and normalised for the plan: (three quarters, one quarter)."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / _WHITE
    images = torch.nn.functional.interpolate(images, size=(image.height, image.width), mode="bilinear")
    images = normalise(images.expand(-1, image.channels, -1, -1), image.mean, image.std)
    targets = torch.tensor(labels, dtype=torch.int64)
    train, test = (torch.tensor(part, dtype=torch.int64) for part in _parts(labels, seed))
    return TensorData(images[train], targets[train]), TensorData(images[test], targets[test])


def open_digits(root: Path) -> Source:
    """The digits as 8×8 bytes, parted as `load_digits` does with seed 0."""
    del root
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = np.round(pixels.reshape(-1, 1, 8, 8) * (255 / _WHITE)).astype(np.uint8)

    def part(members: list[int]) -> Pictures:
        chosen = np.asarray(members)

        def read(indices: Indices) -> Tensor:
            return torch.from_numpy(images[chosen[indices]])

        return Pictures(labels[chosen].astype(np.int64), read)

    train, test = _parts(labels, seed=0)
    return Source(DIGIT_CLASSES, part(train), part(test))


def _parts(labels: np.ndarray[tuple[int], np.dtype[np.int64]], seed: int) -> tuple[list[int], list[int]]:
    train, test = sklearn.model_selection.train_test_split(
        range(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    return train, test
