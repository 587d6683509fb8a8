"""What the loaders share: finding folders and files, decoding, holding images out."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torchvision.transforms.v2.functional as transforms
from PIL import Image
from torch import Tensor

from client_agent.errors import DataError
from client_agent.images import TRAINING_FORMATS, decode, to_tensor
from client_agent.sources import IMAGE_SUFFIXES
from lab.datasets.image_set import Indices, Pictures, Source
from shared.plan import ImagePlan
from shared.problems import DistransError
from shared.seeds import derive_seed

TEST_SHARE = 0.2
_LAYOUT = "Lay out the images of two or more classes as CLASS/*, or as train/CLASS/* and test/CLASS/*."


class DatasetMissing(DistransError):
    """A set that is not where it was looked for."""

    code = "dataset-missing"


class DatasetBroken(DistransError):
    """Files of a set that are not what their publisher describes."""

    code = "dataset-broken"


def first_existing(folders: Iterable[Path], inside: str) -> Path | None:
    """The first of the folders that has `inside` in it."""
    return next((folder for folder in folders if (folder / inside).exists()), None)


def read_lines(file: Path) -> list[list[str]]:
    """The words of every line that is not empty."""
    try:
        return [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetBroken(f"{file} cannot be read: {error}.") from error


def image_files(folder: Path) -> list[Path]:
    """The image files of a folder and below it, sorted; numbers in names count as numbers."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(found, key=lambda file: natural(str(file.relative_to(folder))))


def natural(name: str) -> list[tuple[str, int]]:
    """A sort key by which s2 comes before s10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def pictures_of_files(
    files: Sequence[Path], labels: Sequence[int], channels: int, *, crop: int | None = None, side: int | None = None
) -> Pictures:
    """Files decoded on demand: grey or colour, a square cut from the centre, resized to a square without antialiasing.

    Without `side` all files must have one size.
    """

    def read(chosen: Indices) -> Tensor:
        images: Tensor | None = None
        for place, index in enumerate(chosen.tolist()):
            pixels = _decode(files[index], channels, crop, side)
            if images is None:
                images = torch.empty((len(chosen), *pixels.shape), dtype=torch.uint8)
            if pixels.shape != images.shape[1:]:
                raise DatasetBroken(
                    f"{files[index]} is {pixels.shape[2]}×{pixels.shape[1]}, the files before it are "
                    f"{images.shape[3]}×{images.shape[2]}."
                )
            images[place] = pixels
        return torch.empty((0, channels, side or crop or 1, side or crop or 1)).byte() if images is None else images

    return Pictures(np.asarray(labels, dtype=np.int64), read)


def _decode(file: Path, channels: int, crop: int | None, side: int | None) -> Tensor:
    try:
        image = decode(file, TRAINING_FORMATS)
        pixels = _to_bytes(image, channels)
    except DataError as error:
        raise DatasetBroken(f"{file}: {error}") from error
    if crop is not None:
        if min(image.size) < crop:
            raise DatasetBroken(f"{file} is {image.width}×{image.height}, too small to cut {crop}×{crop} from it.")
        pixels = transforms.center_crop(pixels, [crop, crop])
    if side is not None and pixels.shape[-2:] != (side, side):
        pixels = transforms.resize(pixels.float(), [side, side], antialias=False).round().to(torch.uint8)
    return pixels


def _to_bytes(image: Image.Image, channels: int) -> Tensor:
    """All pixels (C, h, w) as an agent sees them; for 8-bit images without transparency, what Pillow converts to."""
    # Built unchecked: a file may be larger than what a plan may ask for.
    shape = ImagePlan.model_construct(
        channels=channels, height=image.height, width=image.width, mean=(0.0,), std=(1.0,)
    )
    return (to_tensor(image, shape) * 255).round().to(torch.uint8)


def hold_out(classes: tuple[str, ...], all_pictures: Pictures, share: float = TEST_SHARE) -> Source:
    """For sets without a published test part: a share of each class, always the same one, is for testing."""
    train: list[int] = []
    test: list[int] = []
    for label in range(len(classes)):
        members = np.flatnonzero(all_pictures.labels == label)
        order = np.random.default_rng(derive_seed(0, "held-out", label)).permutation(members)
        held = max(1, round(share * len(members))) if len(members) > 1 else 0
        test += order[:held].tolist()
        train += order[held:].tolist()
    return Source(classes, part_of(all_pictures, sorted(train)), part_of(all_pictures, sorted(test)))


def part_of(pictures: Pictures, members: Sequence[int]) -> Pictures:
    """Some of the pictures, as if there were no others."""
    chosen = np.asarray(members, dtype=np.int64)
    return Pictures(pictures.labels[chosen], lambda indices: pictures.read(chosen[indices]))


def class_folders(folder: Path) -> list[Path]:
    """The folders in a folder, one a class, in natural order."""
    found = (entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(found, key=lambda entry: natural(entry.name))


def open_class_folders(
    folders: Sequence[Path], channels: int, *, crop: int | None = None, side: int | None = None
) -> Pictures:
    """All image files of the folders; the label is the folder's place."""
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = image_files(folder)
        files += found
        labels += [label] * len(found)
    return pictures_of_files(files, labels, channels, crop=crop, side=side)


def open_parted_folders(root: Path, channels: int, *, side: int | None = None) -> Source:
    """train/CLASS/… with test/CLASS/…, or CLASS/… alone with a share held out."""
    parted = (root / "train").is_dir()
    folder = root / "train" if parted else root
    folders = class_folders(folder)
    names = tuple(entry.name for entry in folders)
    if len(names) < 2:
        found = f"one class folder, {names[0]}" if names else "no class folders"
        raise DatasetBroken(f"{folder} has {found}.", next_step=_LAYOUT)
    train = open_class_folders(folders, channels, side=side)
    if not parted or not (root / "test").is_dir():
        return hold_out(names, train)
    unknown = sorted({folder.name for folder in class_folders(root / "test")} - set(names))
    if unknown:
        raise DatasetBroken(f"{root / 'test'} has classes that {root / 'train'} has not: {', '.join(unknown[:5])}.")
    return Source(names, train, open_class_folders([root / "test" / name for name in names], channels, side=side))
