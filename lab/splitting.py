"""Cuts a set of images into one folder per site, each as an agent takes it."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from client_agent.sources import Example, Item, open_source
from shared.heterogeneity import Indices, classes_per_client, count_classes, distributional_heterogeneity, paper_shares
from shared.problems import SplitError

_CLASS_NUMBERS = tuple(map(str, range(10_000)))  # names for the classes of arrays that only number them


@dataclass(frozen=True)
class SiteFolder:
    """One site's images on the disk."""

    name: str
    path: Path
    classes: tuple[str, ...]
    images: int


@dataclass(frozen=True)
class SiteShare:
    """What one site is to get."""

    name: str
    classes: tuple[str, ...]
    train: list[Example]
    test: list[Example]

    def write(self, target: Path) -> SiteFolder:
        """Write `target/NAME/train/CLASS/…` and `target/NAME/test/CLASS/…`; nothing of it is left where that fails.

        Without a test image there is no `test`; an agent then holds out some of the training images.
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
                f"{folder} cannot be written: {error}.", next_step=f"Empty {target} before you try again."
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
    """Who gets what, with the classes of the whole and how much the sites differ; nothing is written yet."""

    sites: list[SiteShare]
    classes: tuple[str, ...]
    dh: float


def divide(data: str, clients: int, dh: float, seed: int) -> Division:
    """Share out what `--data` of an agent would take, by the paper's splitter; a SplitError says what would fit.

    All images can be written: files are there to be read, pixels are grey or colour.
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
    width = max(3, len(str(clients)))
    sites, counts = [], np.zeros((clients, len(classes)), dtype=np.int64)
    for number in range(clients):
        own = _pick(source.train, train_parts[number])
        counts[number] = count_classes([positions[example.label] for example in own], len(classes))
        held = tuple(label for label, count in zip(classes, counts[number], strict=True) if count)
        sites.append(SiteShare(f"site-{number + 1:0{width}}", held, own, _pick(test, test_parts[number])))
    return Division(sites, classes, distributional_heterogeneity(counts))


def _check_names(classes: Iterable[str]) -> None:
    """Classes become folders: a name from a file must not lead out of them."""
    for label in classes:
        if label.startswith(".") or "/" in label or "\\" in label or "\0" in label:
            raise SplitError(f"The class name {label!r} cannot be the name of a folder.")


def _check_items(data: str, items: Iterable[Item]) -> None:
    """What cannot be copied is found before anything is written."""
    for item in items:
        if isinstance(item, Path):
            try:
                item.open("rb").close()
            except (OSError, ValueError) as error:
                raise SplitError(
                    f"{data} names an image that cannot be read: {error}.", next_step="Mend its path or the file."
                ) from error
        elif item.shape[0] not in (1, 3):
            raise SplitError(f"Image files have 1 or 3 channels, these images have {item.shape[0]}.")


def _pick(examples: list[Example], indices: Indices) -> list[Example]:
    return [examples[index] for index in indices]


def _write(item: Item, folder: Path, number: int) -> None:
    if isinstance(item, Path):
        shutil.copyfile(item, folder / f"{number}-{item.name}")
    else:
        pixels = (item * 255).round().byte().permute(1, 2, 0).squeeze(2).numpy()
        Image.fromarray(pixels).save(folder / f"{number:05}.png")
