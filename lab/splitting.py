"""Cuts a set of images into one folder per site, each as an agent takes it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sklearn.datasets
from PIL import Image

from client_agent.sources import Example, open_source
from shared.heterogeneity import classes_per_client, count_classes, distributional_heterogeneity, paper_shares
from shared.problems import SplitError

DIGITS = "sklearn:digits"


@dataclass(frozen=True)
class SiteFolder:
    """One site's images on the disk."""

    name: str
    path: Path
    classes: tuple[str, ...]
    images: int


@dataclass(frozen=True)
class Sites:
    """All sites, with the classes of the whole and how much the sites differ."""

    folders: list[SiteFolder]
    classes: tuple[str, ...]
    dh: float


def split_into_sites(data: str, target: Path, clients: int, dh: float, seed: int) -> Sites:
    """Write `target/site-NNN/train` and `test` by the paper's splitter; `data` is an image folder or sklearn:digits."""
    source = target.parent / "images"
    if data == DIGITS:
        _write_digits(source)
        data = str(source)
    split = open_source(data, seed, ())
    classes = tuple(sorted({example.label for example in split.train}))
    each = classes_per_client(dh, len(classes), clients)
    shares = paper_shares(len(classes), clients, each, seed)
    positions = {label: place for place, label in enumerate(classes)}
    width = max(3, len(str(clients)))
    names = [f"site-{number + 1:0{width}}" for number in range(clients)]
    counts = np.zeros((clients, len(classes)), dtype=np.int64)
    for part, examples in (("train", split.train), ("test", split.test)):
        known = [example for example in examples if example.label in positions]
        labels = [positions[example.label] for example in known]
        for number, indices in enumerate(shares.split(labels, seed)):
            _copy(known, indices.tolist(), target / names[number] / part)
            if part == "train":
                counts[number] = count_classes(np.asarray(labels)[indices], len(classes))
    folders = [
        SiteFolder(
            name,
            target / name,
            tuple(label for label, held in zip(classes, counts[number], strict=True) if held),
            int(counts[number].sum()),
        )
        for number, name in enumerate(names)
    ]
    return Sites(folders, classes, distributional_heterogeneity(counts))


def _copy(examples: list[Example], indices: list[int], target: Path) -> None:
    for index in indices:
        example = examples[index]
        if not isinstance(example.item, Path):
            raise SplitError("Only image files can be split into folders.")
        folder = target / example.label
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(example.item, folder / f"{index}-{example.item.name}")


def _write_digits(target: Path) -> None:
    """scikit-learn's digits as 8×8 PNG files, in class folders."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = target / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        grey = np.round(image.reshape(8, 8) * (255 / 16)).astype(np.uint8)
        Image.fromarray(grey).save(folder / f"{number:04}.png")
