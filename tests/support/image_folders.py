"""Small data sets in the layouts that their publishers use."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from lab.datasets.image_set import ImageSet
from lab.datasets.registry import DataSettings, dataset_info, load_image_set
from shared.contract.plan import ImagePlan


def loaded(name: str, root: Path, image: ImagePlan | None = None, **settings: int) -> ImageSet:
    """Load a data set from its folder under the root, not from the cache."""
    load_image_set.cache_clear()
    chosen = DataSettings.model_validate({"name": name, **settings})
    return load_image_set(chosen, image or dataset_info(name).image, root)


def save(path: Path, shade: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    """Save an image of one shade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (shade,) * 3 if mode == "RGB" else shade).save(path)


def write_cifar_binary(file: Path, labels: list[tuple[int, ...]]) -> None:
    """Write records whose image i is filled with i in red, i + 1 in green, i + 2 in blue."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = [np.repeat(np.arange(3, dtype=np.uint8) + place, 1024).tobytes() for place in range(len(labels))]
    file.write_bytes(b"".join(bytes(label) + image for label, image in zip(labels, pixels, strict=True)))


def write_idx(file: Path, values: np.ndarray) -> None:
    """Write a gzipped idx file of unsigned bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    file.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))
