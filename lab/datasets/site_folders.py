"""Splits an image set into one folder per site that an agent can use."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from client_agent.data.sources import open_source
from client_agent.data.splits import Example, Item
from lab.datasets.image_set import Indices
from lab.datasets.splitters import classes_per_client, paper_shares
from shared.contract.errors import SplitError
from shared.learning.heterogeneity import count_classes, distributional_heterogeneity

_CLASS_NUMBERS = tuple(map(str, range(10_000)))  # class names for arrays with numeric labels


@dataclass(frozen=True)
class SiteFolder:
    """One site's images on disk."""

    name: str
    path: Path
    classes: tuple[str, ...]
    images: int


@dataclass(frozen=True)
class SiteShare:
    """The images that one site will get."""

    name: str
    classes: tuple[str, ...]
    train: list[Example]
    test: list[Example]

    def write(self, target: Path) -> SiteFolder:
        """Write `target/NAME/train/CLASS/…` and `target/NAME/test/CLASS/…`; leave nothing behind on failure.

        Without test images there is no `test` folder; an agent then holds out some of the training images.
        """
        folder = target / self.name
        try:
            folder.mkdir(parents=True)
            try:
                self._fill(folder)
            except BaseException:  # Ctrl-C too
                shutil.rmtree(folder, ignore_errors=True)
                raise
        except OSError as error:
            raise SplitError(
                f"Cannot write {folder}: {error}.", next_step=f"Empty {target}, then run the command again."
            ) from error
        return SiteFolder(self.name, folder, self.classes, len(self.train))

    def _fill(self, folder: Path) -> None:
        for part, examples in (("train", self.train), ("test", self.test)):
            for label in {example.label for example in examples}:
                (folder / part / label).mkdir(parents=True)
            for number, example in enumerate(examples):
                _write(example.item, folder / part / example.label, number)


@dataclass(frozen=True)
class Division:
    """A planned split: the sites' shares, all classes, and the DH it results in."""

    sites: list[SiteShare]
    classes: tuple[str, ...]
    dh: float


def plan_split(data: str, clients: int, dh: float, seed: int) -> Division:
    """Split any agent data source with the paper's splitter; a SplitError says what would fit.

    Checks that every image can be written: files are readable, pixels are gray or color.
    """
    source = open_source(data, seed, _CLASS_NUMBERS)
    classes = tuple(sorted({example.label for example in source.train}))
    _check_names(classes)
    shares = paper_shares(len(classes), clients, classes_per_client(dh, len(classes), clients), seed)
    positions = {label: place for place, label in enumerate(classes)}
    test = [example for example in source.test if example.label in positions]
    _check_items(data, [example.item for example in source.train + test])
    train_parts = shares.split([positions[example.label] for example in source.train], seed, names=classes)
    test_parts = shares.split([positions[example.label] for example in test], seed, held_out=True)
    sites, counts = [], np.zeros((clients, len(classes)), dtype=np.int64)
    for number, name in enumerate(shares.sites):
        own = _pick(source.train, train_parts[number])
        counts[number] = count_classes([positions[example.label] for example in own], len(classes))
        held = tuple(label for label, count in zip(classes, counts[number], strict=True) if count)
        sites.append(SiteShare(name, held, own, _pick(test, test_parts[number])))
    return Division(sites, classes, distributional_heterogeneity(counts))


def _check_names(classes: Iterable[str]) -> None:
    """Raise if a class name would lead out of its folder."""
    for label in classes:
        if label.startswith(".") or "/" in label or "\\" in label or "\0" in label:
            raise SplitError(f"Class name {label!r} cannot be used as a folder name.")


def _check_items(data: str, items: Iterable[Item]) -> None:
    """Raise if an image cannot be copied, before anything is written."""
    for item in items:
        if isinstance(item, Path):
            try:
                item.open("rb").close()
            except (OSError, ValueError) as error:
                raise SplitError(
                    f"Cannot read an image listed in {data}: {error}.", next_step="Fix the path or the file."
                ) from error
        elif item.shape[0] not in (1, 3):
            raise SplitError(f"The images have {item.shape[0]} channels; image files need 1 or 3.")


def _pick(examples: list[Example], indices: Indices) -> list[Example]:
    return [examples[index] for index in indices]


def _write(item: Item, folder: Path, number: int) -> None:
    if isinstance(item, Path):
        shutil.copyfile(item, folder / f"{number}-{item.name}")
    else:
        pixels = (item * 255).round().byte().permute(1, 2, 0).squeeze(2).numpy()
        Image.fromarray(pixels).save(folder / f"{number:05}.png")
