"""scikit-learn's 1,797 handwritten digits, which need no download."""

from pathlib import Path

import sklearn.model_selection
import torch
from torch import Tensor

from client_agent.data.sources import digit_images
from lab.datasets.image_set import Indices, LazyImages, Source

CLASSES = tuple(str(digit) for digit in range(10))


def open_digits(root: Path) -> Source:
    """Return the digits as 8×8 bytes, a quarter of each class for testing."""
    del root
    pixels, labels = digit_images()
    images = (pixels * 255).round().to(torch.uint8)
    train, test = sklearn.model_selection.train_test_split(
        range(len(labels)), test_size=0.25, random_state=0, stratify=labels
    )

    def part(indices: list[int]) -> LazyImages:
        chosen = torch.tensor(indices, dtype=torch.int64)

        def read(wanted: Indices) -> Tensor:
            return images[chosen[torch.as_tensor(wanted)]]

        return LazyImages(labels[chosen].numpy(), read)

    return Source(CLASSES, part(train), part(test))
