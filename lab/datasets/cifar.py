"""CIFAR-10 and CIFAR-100: the official binary version, or class folders. Pickled batches are never read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lab.datasets.files import DatasetBroken, first_existing, open_parted_folders
from lab.datasets.image_set import Indices, LazyImages, Source

_PIXELS = 3 * 32 * 32


def open_cifar10(root: Path) -> Source | None:
    """Open data_batch_1.bin … data_batch_5.bin and test_batch.bin, or train/CLASS and test/CLASS."""
    if (root / "train").is_dir():
        return open_parted_folders(root, channels=3)
    folder = first_existing([root, root / "cifar-10-batches-bin"], "data_batch_1.bin")
    if folder is None:
        return None
    train = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
    return _binary(train, [folder / "test_batch.bin"], folder / "batches.meta.txt", label_bytes=1)


def open_cifar100(root: Path) -> Source | None:
    """Open train.bin and test.bin with the fine labels, or train/CLASS and test/CLASS."""
    if (root / "train").is_dir():
        return open_parted_folders(root, channels=3)
    folder = first_existing([root, root / "cifar-100-binary"], "train.bin")
    if folder is None:
        return None
    return _binary([folder / "train.bin"], [folder / "test.bin"], folder / "fine_label_names.txt", label_bytes=2)


def _binary(train: Sequence[Path], test: Sequence[Path], names: Path, label_bytes: int) -> Source:
    try:
        classes = tuple(line.strip() for line in names.read_text().splitlines() if line.strip())
    except OSError as error:
        raise DatasetBroken(f"Cannot read {names}: {error.strerror}.") from error
    parts = [_records(files, label_bytes, len(classes)) for files in (train, test)]
    return Source(classes, parts[0], parts[1])


def _records(files: Sequence[Path], label_bytes: int, classes: int) -> LazyImages:
    """Read records: label bytes, of which the last counts, then 3×32×32 bytes, channel by channel."""
    blocks = []
    for file in files:
        try:
            data = np.fromfile(file, dtype=np.uint8)
        except OSError as error:
            raise DatasetBroken(f"Cannot read {file}: {error.strerror}.") from error
        if data.size == 0 or data.size % (label_bytes + _PIXELS):
            raise DatasetBroken(f"{file} is not a whole number of {label_bytes + _PIXELS}-byte records.")
        blocks.append(data.reshape(-1, label_bytes + _PIXELS))
    records = np.concatenate(blocks)
    labels = records[:, label_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        raise DatasetBroken(f"{files[0].parent} has label {labels.max()}, but names only {classes} classes.")

    def read(chosen: Indices) -> Tensor:
        return torch.from_numpy(records[chosen, label_bytes:].reshape(-1, 3, 32, 32))

    return LazyImages(labels, read)
