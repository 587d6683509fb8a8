"""A site's images, checked against the plan and ready to be trained on."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from client_agent.errors import DataError
from client_agent.images import TRAINING_FORMATS, decode, fit, to_tensor
from client_agent.selection import MAP_ADVICE, NOTHING, Skipped, check_class_map, hints, unused_names
from client_agent.settings import DEFAULT_CACHE_BYTES
from client_agent.sources import Example, Item, open_source
from client_agent.text import storable
from shared.heterogeneity import count_classes
from shared.plan import FederationPlan, ImagePlan

logger = logging.getLogger(__name__)
_UNREADABLE_SHARE = 0.1  # of a set of images; beyond that the disk is the problem, not an image
_PREFETCHED_BATCHES = 3
_SHOWN = 10


def most_unreadable(images: int) -> int:
    """How many of a set of images may be left out: a tenth, or a single one of a few."""
    return min(max(1, int(_UNREADABLE_SHARE * images)), images - 1)


def load_item(item: Item, shape: ImagePlan) -> Tensor:
    """One image as the model sees it."""
    if isinstance(item, Path):
        return to_tensor(decode(item, TRAINING_FORMATS), shape)
    pixels = item
    if pixels.shape[0] != shape.channels:
        if {pixels.shape[0], shape.channels} != {1, 3}:
            raise DataError(f"It has {pixels.shape[0]} channels, the plan asks for {shape.channels}.")
        weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]  # as Pillow turns RGB into grey
        pixels = pixels.expand(3, -1, -1) if shape.channels == 3 else (pixels * weights).sum(0, keepdim=True)
    return fit(pixels, shape)


class ImageSet:
    """Images with their labels. The first ones stay decoded within the cache's budget, the rest is read by workers.

    An image that cannot be read is left out; `unreadable` has the reasons, and the first few are logged once.
    """

    def __init__(
        self,
        examples: list[Example],
        plan: FederationPlan,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        workers: int = 2,
        pin: bool = False,
        max_unreadable: int | None = None,
    ) -> None:
        positions = {name: position for position, name in enumerate(plan.classes)}
        self._items = [example.item for example in examples]
        self._shape, self._workers, self._pin = plan.image, workers, pin
        self.labels = torch.tensor([positions[example.label] for example in examples], dtype=torch.int64)
        image_bytes = 4 * plan.image.channels * plan.image.height * plan.image.width
        self._cache: list[Tensor | None] = [None] * min(len(examples), cache_bytes // image_bytes)
        self._max_unreadable = len(examples) if max_unreadable is None else max_unreadable
        self._unreadable: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def samples(self) -> int:
        """Number of images."""
        return len(self._items)

    @property
    def unreadable(self) -> list[str]:
        """The images that could not be read when they were last tried, with the reasons."""
        with self._lock:
            return [self._unreadable[index] for index in sorted(self._unreadable)]

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass in an order that follows from the seed; the next batches are decoded while one is in use.

        Unreadable images are missing from their batches. DataError when too many of them are.
        """
        order = np.asarray(torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed)))
        parts = deque(order[start : start + size] for start in range(0, len(order), size))
        with ThreadPoolExecutor(self._workers, thread_name_prefix="images") as pool:
            coming: deque[Future[tuple[Tensor, Tensor] | None]] = deque()
            try:
                while parts or coming:
                    while parts and len(coming) < _PREFETCHED_BATCHES:
                        coming.append(pool.submit(self._batch, parts.popleft()))
                    batch = coming.popleft().result()
                    if len(self._unreadable) > self._max_unreadable:
                        raise DataError(
                            f"{len(self._unreadable)} of {self.samples} images cannot be read, "
                            f"such as {self.unreadable[0]}",
                            next_step="Check the disk or the mount that holds them.",
                        )
                    if batch is not None:
                        yield batch
            finally:
                for future in coming:
                    future.cancel()

    def _batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor] | None:
        found = [(int(index), image) for index in indices if (image := self._image(int(index))) is not None]
        if not found:
            return None
        images = torch.stack([image for _, image in found])
        return images.pin_memory() if self._pin else images, self.labels[[index for index, _ in found]]

    def _image(self, index: int) -> Tensor | None:
        cached = self._cache[index] if index < len(self._cache) else None
        if cached is not None:
            return cached
        item = self._items[index]
        try:
            loaded = load_item(item, self._shape)
        except Exception as error:  # whatever is wrong with one image is no fault of the others
            reason = storable(f"{item if isinstance(item, Path) else f'image {index}'}: {error}")
            with self._lock:
                is_news = index not in self._unreadable and len(self._unreadable) < _SHOWN
                self._unreadable[index] = reason
            if is_news:
                logger.warning("left out an image that cannot be read: %s", reason)
            return None
        if self._unreadable:
            with self._lock:
                self._unreadable.pop(index, None)
        if index < len(self._cache):
            self._cache[index] = loaded
        return loaded


@dataclass(frozen=True)
class DataReport:
    """What the check of a site's data found."""

    class_counts: dict[str, int]
    test_counts: dict[str, int]
    bad: list[str] = field(default_factory=list)
    skipped: Skipped = NOTHING

    @property
    def held_classes(self) -> dict[str, int]:
        """The class counts without the zeros: a plan may have many more classes than a site."""
        return {name: count for name, count in self.class_counts.items() if count}

    @property
    def train_images(self) -> int:
        """Number of training images."""
        return sum(self.class_counts.values())

    @property
    def test_images(self) -> int:
        """Number of held-out images."""
        return sum(self.test_counts.values())


@dataclass(frozen=True)
class SiteData:
    """Training and held-out images of a site."""

    train: ImageSet
    test: ImageSet
    report: DataReport

    def describe_unreadable(self) -> str:
        """How many images were left out when they were last read, and why; empty when there were none."""
        parts = []
        for name, images in (("training", self.train), ("held-out", self.test)):
            if reasons := images.unreadable:
                parts.append(f"{len(reasons)} of {images.samples} {name} images cannot be read, such as {reasons[0]}")
        return " ".join(parts)


def open_data(
    spec: str,
    plan: FederationPlan,
    *,
    skip_bad: bool = False,
    check_files: bool = False,
    class_map: Mapping[str, str] | None = None,
    skipped: Skipped = NOTHING,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    pin: bool = False,
    on_file: Callable[[int, int], None] = lambda _done, _total: None,
) -> SiteData:
    """Open a site's data for a plan; a DataError lists what is wrong, `skip_bad` goes on without it.

    `check_files` decodes every file once, so that a broken one is found before training and not during it. What an
    earlier check has `skipped` is left out without a word; a file of it that has been repaired is used again.
    """
    check_class_map(class_map or {}, plan.classes)
    found = open_source(spec, plan.seed, plan.classes)
    split = found.renamed(class_map or {})
    known = set(plan.classes)
    held = {example.label for example in split.train + split.test}
    unknown = sorted(held - known)
    parts = [[example for example in part if example.label in known] for part in (split.train, split.test)]
    files = [one.item for one in parts[0] + parts[1] if isinstance(one.item, Path)]
    skipped_files, skipped_classes = set(skipped.files), set(skipped.classes)  # either may be long
    suspects = files if check_files else [file for file in files if str(file) in skipped_files]
    broken = _broken_files(suspects, plan.image, on_file)
    parts = [[example for example in part if example.item not in broken] for part in parts]
    bad = [f"class {name!r} has no images" for name in split.empty if name not in skipped_classes]
    unheard = [name for name in unknown if name not in skipped_classes]
    bad += [f"class {name!r} is not in the plan{hint}" for name, hint in hints(unheard, plan.classes, held).items()]
    if check_files:
        bad += unused_names(class_map or {}, {*found.empty, *(one.label for one in found.train + found.test)})
    bad += [f"{path}: {reason}" for path, reason in broken.items() if str(path) not in skipped_files]
    if bad and not skip_bad:
        raise _misfit(spec, plan, bad, has_unknown=bool(unheard))
    if not parts[0]:
        raise DataError(f"There is no training image of a class of the plan at {spec}.")
    budgets = _share_budget(cache_bytes, len(parts[0]), len(parts[1]))
    most = most_unreadable(len(parts[0]))
    train, test = (
        ImageSet(part, plan, cache_bytes=budget, pin=pin, max_unreadable=limit)
        for part, budget, limit in zip(parts, budgets, (most, None), strict=True)
    )
    counts, test_counts = (
        dict(zip(plan.classes, count_classes(part.labels, len(plan.classes)).tolist(), strict=True))
        for part in (train, test)
    )
    left_out = Skipped(files=tuple(map(str, broken)), classes=(*split.empty, *unknown))
    return SiteData(train, test, DataReport(counts, test_counts, bad, left_out))


def _misfit(spec: str, plan: FederationPlan, bad: list[str], *, has_unknown: bool) -> DataError:
    shown = "\n".join(f"  {line}" for line in bad[:_SHOWN])
    more = f"\n  … and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    advice = (
        f"Rename classes that have another name in the plan, or map them: {MAP_ADVICE}" if has_unknown else "Fix these."
    )
    return DataError(
        f"The data at {spec} do not fit the plan:\n{shown}{more}\nThe plan's classes: {', '.join(plan.classes[:50])}",
        next_step=f"\n{advice}\nPass --skip-bad to leave out everything that is listed here.",
    )


def _share_budget(cache_bytes: int, train: int, test: int) -> tuple[int, int]:
    share = train / max(train + test, 1)
    return int(cache_bytes * share), int(cache_bytes * (1 - share))


def _broken_files(files: list[Path], shape: ImagePlan, on_file: Callable[[int, int], None]) -> dict[Path, str]:
    broken: dict[Path, str] = {}

    def check(file: Path) -> tuple[Path, str | None]:
        try:
            load_item(file, shape)
        except Exception as error:  # as in ImageSet: whatever is wrong, the image cannot be used
            return file, str(error)
        return file, None

    with ThreadPoolExecutor(4) as pool:
        for done, (file, reason) in enumerate(pool.map(check, files), start=1):
            on_file(done, len(files))
            if reason is not None:
                broken[file] = reason
    return broken
