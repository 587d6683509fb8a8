"""Where a site's images come from: a list of items with class names, not yet decoded."""

import csv
import importlib
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_agent.errors import DataError
from shared.seeds import derive_seed

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".pgm", ".ppm", ".pnm", ".bmp", ".tif", ".tiff", ".webp", ".gif"}
TEST_SHARE = 0.2
Item = Path | Tensor  # a file, or pixels (C, h, w) in [0, 1]


@dataclass(frozen=True)
class Example:
    """One image and the name of its class."""

    item: Item
    label: str


@dataclass(frozen=True)
class Split:
    """A site's examples; test ones are never trained on. `empty` names classes that have a place but no image."""

    train: list[Example]
    test: list[Example]
    empty: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> "Split":
        """The same examples, with other names for some of the classes."""
        if not names:
            return self
        train, test = (
            [Example(one.item, names.get(one.label, one.label)) for one in part] for part in (self.train, self.test)
        )
        held = {example.label for example in train + test}
        empty = dict.fromkeys(names.get(name, name) for name in self.empty)
        return Split(train, test, tuple(name for name in empty if name not in held))


def open_source(spec: str, seed: int, classes: tuple[str, ...]) -> Split:
    """The examples behind a `--data` value.

    A folder (`train/CLASS/…` with `test/CLASS/…`, or `CLASS/…` alone), a .csv (path,label[,split]), an .npz (images,
    labels or x_train, y_train, x_test, y_test), `sklearn:digits`, `torchvision:NAME:ROOT`, `package.module:function`.
    """
    if spec == "sklearn:digits":
        return _stratify(_digits(), seed)
    if spec.startswith("torchvision:"):
        return _torchvision(spec, seed)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(path, seed)
    if path.suffix == ".csv":
        return _csv(path, seed)
    if path.suffix == ".npz":
        return _npz(path, seed, classes)
    if ":" in spec and not path.exists():
        return _custom(spec, seed)
    raise DataError(
        f"There are no data at {spec!r}.",
        next_step="Give a folder with one folder per class, a .csv, an .npz, sklearn:digits, "
        "torchvision:NAME:ROOT or package.module:function.",
    )


def _stratify(examples: list[Example], seed: int, empty: tuple[str, ...] = ()) -> Split:
    """One fifth of each class, chosen by the seed, is held out; a class of one image keeps it for training."""
    by_class: defaultdict[str, list[Example]] = defaultdict(list)
    for example in examples:
        by_class[example.label].append(example)
    train: list[Example] = []
    test: list[Example] = []
    for label, members in sorted(by_class.items()):
        order = np.random.default_rng(derive_seed(seed, "held-out", label)).permutation(len(members))
        held_out = max(1, round(TEST_SHARE * len(members))) if len(members) > 1 else 0
        test += [members[index] for index in sorted(order[:held_out])]
        train += [members[index] for index in sorted(order[held_out:])]
    return Split(train, test, empty)


def _folder(path: Path, seed: int) -> Split:
    if (path / "train").is_dir():
        train, empty = _class_folders(path / "train")
        test = _class_folders(path / "test")[0] if (path / "test").is_dir() else []
        if test:
            return Split(train, test, empty)
        return _stratify(train, seed, empty)
    examples, empty = _class_folders(path)
    return _stratify(examples, seed, empty)


def _class_folders(path: Path) -> tuple[list[Example], tuple[str, ...]]:
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not folders:
        raise DataError(f"{path} has no folders; one folder per class is expected, named like the class.")
    examples: list[Example] = []
    empty: list[str] = []
    for folder in folders:
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        examples += [Example(file, folder.name) for file in files]
        if not files:
            empty.append(folder.name)
    return examples, tuple(empty)


def _csv(path: Path, seed: int) -> Split:
    try:
        with path.open(newline="") as handle:
            rows = list(csv.DictReader(handle))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not rows or not {"path", "label"} <= rows[0].keys():
        raise DataError(f"{path} needs the columns path and label in its first line.")
    examples: dict[str, list[Example]] = {"train": [], "test": []}
    for number, row in enumerate(rows, start=2):
        if not row["path"] or not row["label"]:
            raise DataError(f"Line {number} of {path} has no path or no label.")
        part = row.get("split") or "train"
        if part not in examples:
            raise DataError(f"Line {number} of {path} has the split {part!r}; use train or test.")
        examples[part].append(Example(path.parent / row["path"], row["label"]))
    if examples["test"]:
        return Split(examples["train"], examples["test"])
    return _stratify(examples["train"], seed)


def _npz(path: Path, seed: int, classes: tuple[str, ...]) -> Split:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as .npz: {error}.") from error
    if {"x_train", "y_train", "x_test", "y_test"} <= found.keys():
        return Split(
            _array_examples(path, found["x_train"], found["y_train"], classes),
            _array_examples(path, found["x_test"], found["y_test"], classes),
        )
    if {"images", "labels"} <= found.keys():
        return _stratify(_array_examples(path, found["images"], found["labels"], classes), seed)
    raise DataError(f"{path} needs the arrays images and labels, or x_train, y_train, x_test and y_test.")


def _array_examples(path: Path, images: Any, labels: Any, classes: tuple[str, ...]) -> list[Example]:
    """(n, H, W), (n, H, W, C) or (n, C, H, W); integers span their dtype, floats are in [0, 1] already."""
    if images.ndim not in (3, 4) or len(images) != len(labels):
        raise DataError(f"{path} has images of shape {images.shape} and {len(labels)} labels.")
    pixels = torch.from_numpy(np.ascontiguousarray(images).astype(np.float32))
    if np.issubdtype(images.dtype, np.integer):
        pixels /= float(np.iinfo(images.dtype).max)
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif images.shape[-1] in (1, 3, 4) and images.shape[1] not in (1, 3, 4):
        pixels = pixels.permute(0, 3, 1, 2)
    if np.issubdtype(labels.dtype, np.integer):
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
            raise DataError(f"{path} has labels outside 0 … {len(classes) - 1}, the plan's classes by position.")
        names = [classes[int(label)] for label in labels]
    else:
        names = [str(label) for label in labels]
    return [Example(image, name) for image, name in zip(pixels, names, strict=True)]


def digit_images() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits: pixels (n, 1, 8, 8) in 0 … 1, and which digit each of them is."""
    import sklearn.datasets

    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels, dtype=torch.int64)


def _digits() -> list[Example]:
    images, labels = digit_images()
    return [Example(image, str(label)) for image, label in zip(images, labels.tolist(), strict=True)]


def _torchvision(spec: str, seed: int) -> Split:
    import torchvision.datasets

    _, _, rest = spec.partition(":")
    name, _, root = rest.partition(":")
    maker = getattr(torchvision.datasets, name, None)
    if maker is None or not root:
        raise DataError(
            f"{spec!r} does not name a torchvision set.", next_step="Use torchvision:CIFAR10:/path/to/root."
        )
    parts: list[list[Example]] = []
    for train in (True, False):
        try:
            dataset = maker(root, train=train, download=False)
        except (RuntimeError, FileNotFoundError, TypeError) as error:
            raise DataError(
                f"torchvision's {name} is not below {root}: {error}", next_step="Download it there first."
            ) from error
        names = list(getattr(dataset, "classes", []))
        parts.append(_examples_of((pair for pair in dataset), names))
    return Split(parts[0], parts[1]) if parts[1] else _stratify(parts[0], seed)


def _custom(spec: str, seed: int) -> Split:
    module_name, _, function_name = spec.partition(":")
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"{spec!r} cannot be imported: {error}.") from error
    try:
        result = function()
        if isinstance(result, tuple) and len(result) == 2:
            return Split(_examples_of(result[0], []), _examples_of(result[1], []))
        return _stratify(_examples_of(result, []), seed)
    except DataError:
        raise
    except (Exception, SystemExit) as error:  # the site's own code may raise anything
        raise DataError(f"{spec!r} failed: {type(error).__name__}: {error}.") from error


def _examples_of(pairs: Iterable[tuple[Any, Any]], names: list[str]) -> list[Example]:
    """(image, label) pairs; an image is a path, a PIL image, an array or a tensor; a label is a name or an index."""
    import torchvision.transforms.v2.functional as transforms

    examples = []
    for image, label in pairs:
        if isinstance(image, (str, Path)):
            item: Item = Path(image)
        elif isinstance(image, Tensor):
            item = transforms.to_dtype(image, torch.float32, scale=True)
        else:
            item = transforms.to_dtype(transforms.to_image(image), torch.float32, scale=True)
        examples.append(Example(item, names[label] if names and not isinstance(label, str) else str(label)))
    return examples
