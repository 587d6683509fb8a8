"""Splits an image set into one folder per site that an agent can use."""

import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from client_agent.data.sources import open_source
from client_agent.data.splits import Example, Item
from lab.datasets.clients import Shift
from lab.datasets.image_set import Indices
from lab.datasets.scanners import PLAIN, Scanner
from lab.datasets.splitters import classes_per_client, paper_shares
from shared.contract.errors import SplitError
from shared.contract.seeds import derive_seed
from shared.learning.heterogeneity import count_classes, distributional_heterogeneity

_CLASS_NUMBERS = tuple(map(str, range(10_000)))  # class names for arrays with numeric labels


@dataclass(frozen=True)
class SiteFolder:
    """One site's images on disk."""

    name: str
    path: Path
    classes: tuple[str, ...]
    images: int
    scanner: str = "plain"


@dataclass(frozen=True)
class SiteShare:
    """The images that one site will get."""

    name: str
    classes: tuple[str, ...]
    train: list[Example]
    test: list[Example]
    scanner: Scanner = PLAIN

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
        return SiteFolder(self.name, folder, self.classes, len(self.train), self.scanner.name)

    def _fill(self, folder: Path) -> None:
        for part, examples in (("train", self.train), ("test", self.test)):
            for label in {example.label for example in examples}:
                (folder / part / label).mkdir(parents=True)
            for number, example in enumerate(examples):
                self._write(example.item, folder / part / example.label, number)

    def _write(self, item: Item, folder: Path, number: int) -> None:
        if isinstance(item, Path) and not self.scanner.changes_images:
            shutil.copyfile(item, folder / f"{number}-{item.name}")
        else:
            name = f"{number}-{item.stem}.png" if isinstance(item, Path) else f"{number:05}.png"
            Image.fromarray(self.scanner.scan(item)).save(folder / name)


@dataclass(frozen=True)
class Division:
    """A planned split: the sites' shares, all classes, and the DH it results in."""

    sites: list[SiteShare]
    classes: tuple[str, ...]
    dh: float


def plan_split(data: str, clients: int, dh: float, seed: int, *, images: int = 0, shift: Shift = "none") -> Division:
    """Split any agent data source with the paper's splitter; a SplitError says what would fit.

    With `images`, a site trains on that many of its images at most, and holds out all others. Checks
    that every image can be written: files are readable, pixels are gray or color.
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
        own, rest = _keep(_pick(source.train, train_parts[number]), images, seed, name)
        counts[number] = count_classes([positions[example.label] for example in own], len(classes))
        held = tuple(label for label, count in zip(classes, counts[number], strict=True) if count)
        held_out = _pick(test, test_parts[number]) + rest
        sites.append(SiteShare(name, held, own, held_out, Scanner(shift, number)))
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


def _keep(examples: list[Example], wanted: int, seed: int, site: str) -> tuple[list[Example], list[Example]]:
    """Divide a site's examples into as many as wanted, of each class in proportion but at least one, and the rest."""
    if not wanted or wanted >= len(examples):
        return examples, []
    by_class: defaultdict[str, list[int]] = defaultdict(list)
    for place in np.random.default_rng(derive_seed(seed, "few images", site)).permutation(len(examples)):
        by_class[examples[place].label].append(int(place))
    if wanted < len(by_class):
        raise SplitError(
            f"{site} has {len(by_class)} classes and cannot train on {wanted} images.",
            next_step=f"Use --images {len(by_class)} or more, or 0 for all.",
        )
    # The first image of every class, then always one of the class that has had the smallest share of its images.
    ranks = {place: turn / len(places) for places in by_class.values() for turn, place in enumerate(places)}
    order = sorted(ranks, key=lambda place: (ranks[place], place))
    return _pick(examples, np.sort(order[:wanted])), _pick(examples, np.sort(order[wanted:]))


def _pick(examples: list[Example], indices: Indices) -> list[Example]:
    return [examples[index] for index in indices]
