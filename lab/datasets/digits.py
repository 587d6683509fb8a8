"""scikit-learn's 1,797 handwritten digits, which need no download."""

from pathlib import Path

import sklearn.model_selection
import torch
from torch import Tensor

from client_agent.sources import digit_images
from lab.datasets.image_set import Indices, Pictures, Source
from shared.offsets import normalise
from shared.plan import ImagePlan
from shared.tensor_data import TensorData

DIGIT_CLASSES = tuple(str(digit) for digit in range(10))


def load_digits(image: ImagePlan, seed: int = 0) -> tuple[TensorData, TensorData]:
    """All digits resized and normalised for the plan: (three quarters, one quarter)."""
    images, labels = digit_images()
    images = torch.nn.functional.interpolate(images, size=(image.height, image.width), mode="bilinear")
    images = normalise(images.expand(-1, image.channels, -1, -1), image.mean, image.std)
    train, test = _parts(labels, seed)
    return TensorData(images[train], labels[train]), TensorData(images[test], labels[test])


def open_digits(root: Path) -> Source:
    """The digits as 8×8 bytes, parted as `load_digits` does with seed 0."""
    del root
    pixels, labels = digit_images()
    images = (pixels * 255).round().to(torch.uint8)

    def part(chosen: Tensor) -> Pictures:
        def read(indices: Indices) -> Tensor:
            return images[chosen[torch.as_tensor(indices)]]

        return Pictures(labels[chosen].numpy(), read)

    train, test = _parts(labels, seed=0)
    return Source(DIGIT_CLASSES, part(train), part(test))


def _parts(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    train, test = sklearn.model_selection.train_test_split(
        range(len(labels)), test_size=0.25, random_state=seed, stratify=labels
    )
    return torch.tensor(train, dtype=torch.int64), torch.tensor(test, dtype=torch.int64)
