"""Helpers for the loaders: find folders and files, decode images, hold out test images."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torchvision.transforms.v2.functional as transforms
from PIL import Image
from torch import Tensor

from client_agent.data.images import TRAINING_FORMATS, decode, to_tensor
from client_agent.data.sources import IMAGE_SUFFIXES
from client_agent.errors import DataError
from lab.datasets.image_set import Indices, LazyImages, Source
from shared.contract.errors import DistransError
from shared.contract.plan import ImagePlan
from shared.contract.seeds import derive_seed

TEST_SHARE = 0.2
_LAYOUT = "Arrange the images of two or more classes as CLASS/*, or as train/CLASS/* and test/CLASS/*."


class DatasetMissing(DistransError):
    """A data set that was not found."""

    code = "dataset-missing"


class DatasetBroken(DistransError):
    """A data set whose files do not match their published description."""

    code = "dataset-broken"


def first_existing(folders: Iterable[Path], inside: str) -> Path | None:
    """Return the first of the folders that contains `inside`."""
    return next((folder for folder in folders if (folder / inside).exists()), None)


def read_lines(file: Path) -> list[list[str]]:
    """Return the words of every non-empty line."""
    try:
        return [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetBroken(f"Cannot read {file}: {error}.") from error


def image_files(folder: Path) -> list[Path]:
    """Return the image files in and below a folder, in natural order."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(found, key=lambda file: natural(str(file.relative_to(folder))))


def natural(name: str) -> list[tuple[str, int]]:
    """Return a sort key that puts s2 before s10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def pictures_of_files(
    files: Sequence[Path], labels: Sequence[int], channels: int, *, crop: int | None = None, side: int | None = None
) -> LazyImages:
    """Return files to decode on demand: gray or color, center-cropped to a square, resized without antialiasing.

    Without `side`, all files must have the same size.
    """

    def read(chosen: Indices) -> Tensor:
        images: Tensor | None = None
        for place, index in enumerate(chosen.tolist()):
            pixels = _decode(files[index], channels, crop, side)
            if images is None:
                images = torch.empty((len(chosen), *pixels.shape), dtype=torch.uint8)
            if pixels.shape != images.shape[1:]:
                raise DatasetBroken(
                    f"{files[index]} is {pixels.shape[2]}×{pixels.shape[1]}, but the files before it are "
                    f"{images.shape[3]}×{images.shape[2]}."
                )
            images[place] = pixels
        return torch.empty((0, channels, side or crop or 1, side or crop or 1)).byte() if images is None else images

    return LazyImages(np.asarray(labels, dtype=np.int64), read)


def _decode(file: Path, channels: int, crop: int | None, side: int | None) -> Tensor:
    try:
        image = decode(file, TRAINING_FORMATS)
        pixels = _to_bytes(image, channels)
    except DataError as error:
        raise DatasetBroken(f"{file}: {error}") from error
    if crop is not None:
        if min(image.size) < crop:
            raise DatasetBroken(f"{file} is {image.width}×{image.height}, too small for a {crop}×{crop} crop.")
        pixels = transforms.center_crop(pixels, [crop, crop])
    if side is not None and pixels.shape[-2:] != (side, side):
        pixels = transforms.resize(pixels.float(), [side, side], antialias=False).round().to(torch.uint8)
    return pixels


def _to_bytes(image: Image.Image, channels: int) -> Tensor:
    """Return all pixels (C, h, w) as an agent sees them; for opaque 8-bit images, exactly as Pillow converts them."""
    # Not validated: a file may be larger than a plan allows.
    shape = ImagePlan.model_construct(
        channels=channels, height=image.height, width=image.width, mean=(0.0,), std=(1.0,)
    )
    return (to_tensor(image, shape) * 255).round().to(torch.uint8)


def hold_out(classes: tuple[str, ...], all_pictures: LazyImages, share: float = TEST_SHARE) -> Source:
    """Hold out a fixed share of each class for testing, for data sets without a published test part."""
    train: list[int] = []
    test: list[int] = []
    for label in range(len(classes)):
        members = np.flatnonzero(all_pictures.labels == label)
        order = np.random.default_rng(derive_seed(0, "held-out", label)).permutation(members)
        held = max(1, round(share * len(members))) if len(members) > 1 else 0
        test += order[:held].tolist()
        train += order[held:].tolist()
    return Source(classes, part_of(all_pictures, sorted(train)), part_of(all_pictures, sorted(test)))


def part_of(pictures: LazyImages, members: Sequence[int]) -> LazyImages:
    """Return only the pictures with these indices."""
    chosen = np.asarray(members, dtype=np.int64)
    return LazyImages(pictures.labels[chosen], lambda indices: pictures.read(chosen[indices]))


def class_folders(folder: Path) -> list[Path]:
    """Return the subfolders, one per class, in natural order."""
    found = (entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(found, key=lambda entry: natural(entry.name))


def open_class_folders(
    folders: Sequence[Path], channels: int, *, crop: int | None = None, side: int | None = None
) -> LazyImages:
    """Return all image files of the folders; the label is the position of the folder."""
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = image_files(folder)
        files += found
        labels += [label] * len(found)
    return pictures_of_files(files, labels, channels, crop=crop, side=side)


def open_parted_folders(root: Path, channels: int, *, side: int | None = None) -> Source:
    """Open train/CLASS/… with test/CLASS/…, or CLASS/… alone with a share held out."""
    parted = (root / "train").is_dir()
    folder = root / "train" if parted else root
    folders = class_folders(folder)
    names = tuple(entry.name for entry in folders)
    if len(names) < 2:
        found = f"only one class folder, {names[0]}" if names else "no class folders"
        raise DatasetBroken(f"{folder} has {found}.", next_step=_LAYOUT)
    train = open_class_folders(folders, channels, side=side)
    if not parted or not (root / "test").is_dir():
        return hold_out(names, train)
    unknown = sorted({folder.name for folder in class_folders(root / "test")} - set(names))
    if unknown:
        raise DatasetBroken(f"{root / 'test'} has classes missing from {root / 'train'}: {', '.join(unknown[:5])}.")
    return Source(names, train, open_class_folders([root / "test" / name for name in names], channels, side=side))
