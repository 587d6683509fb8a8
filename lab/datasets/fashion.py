"""Fashion-MNIST in the idx format, as Zalando publishes it and Debian packages it."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lab.datasets.files import DatasetBroken, first_existing
from lab.datasets.image_set import Indices, LazyImages, Source

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # installed by the package dataset-fashion-mnist
_UNSIGNED_BYTES = 0x08


def open_fashion_mnist(root: Path) -> Source | None:
    """Open train-… and t10k-images-idx3-ubyte.gz with their labels, from the root or else from Debian's folder."""
    folder = first_existing([root, DEBIAN], "train-images-idx3-ubyte.gz")
    if folder is None:
        return None
    return Source(CLASSES, _part(folder, "train"), _part(folder, "t10k"))


def _part(folder: Path, prefix: str) -> LazyImages:
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz").astype(np.int64)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DatasetBroken(f"The {prefix} images and labels in {folder} do not match.")
    if labels.size and labels.max() >= len(CLASSES):
        raise DatasetBroken(f"The {prefix} labels in {folder} go beyond {len(CLASSES)} classes.")

    def read(chosen: Indices) -> Tensor:
        return torch.from_numpy(images[chosen][:, None])

    return LazyImages(labels, read)


def read_idx(file: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read a gzipped idx file of unsigned bytes: two zeros, type, rank, sizes, values."""
    try:
        data = gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetBroken(f"Cannot read {file}: {error}.") from error
    rank = data[3] if len(data) > 3 else 0
    if len(data) < 4 + 4 * rank or data[:3] != bytes([0, 0, _UNSIGNED_BYTES]) or not rank:
        raise DatasetBroken(f"{file} is not an idx file of unsigned bytes.")
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * rank)
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise DatasetBroken(f"{file} should have {'×'.join(map(str, shape))} values but has {values.size}.")
    return values.reshape(shape)
