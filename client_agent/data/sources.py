"""Sources of a site's images: folders, files and functions, read as examples that are not decoded yet."""

import csv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_agent.data.splits import Example, Item, Split, stratify
from client_agent.errors import DataError, describe_error
from shared.system.plugins import load_function

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".pgm", ".ppm", ".pnm", ".bmp", ".tif", ".tiff", ".webp", ".gif"}


def open_source(spec: str, seed: int, classes: tuple[str, ...]) -> Split:
    """Return the examples that a `--data` value names.

    A folder (`train/CLASS/…` with `test/CLASS/…`, or `CLASS/…` alone), a .csv (path,label[,split]), an .npz (images,
    labels or x_train, y_train, x_test, y_test), `sklearn:digits`, `torchvision:NAME:ROOT`, `package.module:function`.
    """
    if spec == "sklearn:digits":
        return stratify(_digits(), seed)
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
        f"There is no data at {spec!r}.",
        next_step="Use a folder with one subfolder per class, a .csv, an .npz, sklearn:digits, "
        "torchvision:NAME:ROOT or package.module:function.",
    )


def _folder(path: Path, seed: int) -> Split:
    if (path / "train").is_dir():
        train, empty = _class_folders(path / "train")
        test = _class_folders(path / "test")[0] if (path / "test").is_dir() else []
        if test:
            return Split(train, test, empty)
        return stratify(train, seed, empty)
    examples, empty = _class_folders(path)
    return stratify(examples, seed, empty)


def _class_folders(path: Path) -> tuple[list[Example], tuple[str, ...]]:
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if not folders:
        raise DataError(f"{path} has no subfolders; create one per class, named after the class.")
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
        raise DataError(f"{path} must name the columns path and label in its first line.")
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
    return stratify(examples["train"], seed)


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
        return stratify(_array_examples(path, found["images"], found["labels"], classes), seed)
    raise DataError(f"{path} must hold the arrays images and labels, or x_train, y_train, x_test and y_test.")


def _array_examples(path: Path, images: Any, labels: Any, classes: tuple[str, ...]) -> list[Example]:
    """Convert images (n, H, W), (n, H, W, C) or (n, C, H, W); integers span their dtype, floats are in [0, 1]."""
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
    """Return scikit-learn's 1,797 handwritten digits: pixels (n, 1, 8, 8) in [0, 1], and labels."""
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
        raise DataError(f"{spec!r} is not a torchvision dataset.", next_step="Use torchvision:CIFAR10:/path/to/root.")
    parts: list[list[Example]] = []
    for train in (True, False):
        try:
            dataset = maker(root, train=train, download=False)
        except (RuntimeError, FileNotFoundError, TypeError) as error:
            raise DataError(
                f"torchvision's {name} is not in {root}: {error}", next_step="Download it there first."
            ) from error
        names = list(getattr(dataset, "classes", []))
        parts.append(_examples_of((pair for pair in dataset), names))
    return Split(parts[0], parts[1]) if parts[1] else stratify(parts[0], seed)


def _custom(spec: str, seed: int) -> Split:
    function = load_function(spec, DataError, "at this site")
    try:
        result = function()
        if isinstance(result, tuple) and len(result) == 2:
            return Split(_examples_of(result[0], []), _examples_of(result[1], []))
        return stratify(_examples_of(result, []), seed)
    except DataError:
        raise
    except (Exception, SystemExit) as error:  # the site's code may raise anything
        raise DataError(f"{spec!r} failed: {describe_error(error)}") from error


def _examples_of(pairs: Iterable[tuple[Any, Any]], names: list[str]) -> list[Example]:
    """Convert (image, label) pairs: paths, PIL images, arrays or tensors, with names or indices as labels."""
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
