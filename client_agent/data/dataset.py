"""A site's images, checked against the plan and ready for training."""

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

from client_agent.data.class_map import MAP_ADVICE, check_class_map, suggest_classes, unused_names
from client_agent.data.holdout import holdout_sizes
from client_agent.data.images import TRAINING_FORMATS, decode, resize_and_normalize, to_tensor
from client_agent.data.sources import open_source
from client_agent.data.splits import Example, Item
from client_agent.errors import DataError
from client_agent.settings import DEFAULT_CACHE_BYTES, NOTHING_SKIPPED, SkippedData
from client_agent.status import HoldoutSizes
from client_agent.text import truncate_and_escape
from shared.contract.plan import FederationPlan, ImagePlan
from shared.learning.heterogeneity import count_classes

logger = logging.getLogger(__name__)
_UNREADABLE_SHARE = 0.1  # if more of a set cannot be read, the disk is the problem, not single images
_PREFETCHED_BATCHES = 3
_SHOWN = 10


def unreadable_limit(images: int) -> int:
    """Return how many of a set of images may be skipped: a tenth, but at least one and never all."""
    return min(max(1, int(_UNREADABLE_SHARE * images)), images - 1)


def load_item(item: Item, shape: ImagePlan) -> Tensor:
    """Return an image in the form the model expects."""
    if isinstance(item, Path):
        return to_tensor(decode(item, TRAINING_FORMATS), shape)
    pixels = item
    if pixels.shape[0] != shape.channels:
        if {pixels.shape[0], shape.channels} != {1, 3}:
            raise DataError(f"It has {pixels.shape[0]} channels; the plan asks for {shape.channels}.")
        weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]  # as Pillow converts RGB to gray
        pixels = pixels.expand(3, -1, -1) if shape.channels == 3 else (pixels * weights).sum(0, keepdim=True)
    return resize_and_normalize(pixels, shape)


class SiteImages:
    """Images with their labels. As many as the cache holds stay decoded and normalized; workers read the rest anew.

    Images that cannot be read are skipped; `unreadable` has the reasons, and the first few are logged.
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
        # Takes memory only as images arrive. One tensor, so that a batch is a single copy.
        self._cache = torch.empty(min(len(examples), cache_bytes // image_bytes), *plan.image.shape)
        self._is_cached = np.zeros(len(self._cache), dtype=bool)
        self._max_unreadable = len(examples) if max_unreadable is None else max_unreadable
        self._unreadable: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def samples(self) -> int:
        """Number of images."""
        return len(self._items)

    @property
    def uncached(self) -> int:
        """Number of images that the cache has no room for."""
        return self.samples - len(self._cache)

    @property
    def unreadable(self) -> list[str]:
        """Why images could not be read, one line for each that failed when it was last tried."""
        with self._lock:
            return [self._unreadable[index] for index in sorted(self._unreadable)]

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass over the images in an order derived from the seed, decoding ahead in the background.

        Unreadable images are missing from their batches; raises DataError if there are too many.
        """
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed))
        for _, images, labels in self._read(np.asarray(order), size):
            yield images, labels

    def in_order(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (positions, images, labels) in one pass, in the order of `labels`; otherwise like `batches`."""
        yield from self._read(np.arange(self.samples), size)

    def _read(self, order: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        parts = deque(order[start : start + size] for start in range(0, len(order), size))
        if not self.uncached and self._is_cached.all() and not self._pin:  # workers would take longer to wake up
            for part in parts:
                positions = torch.from_numpy(part)
                yield positions, self._cache[positions], self.labels[positions]
            return
        with ThreadPoolExecutor(self._workers, thread_name_prefix="images") as pool:
            coming: deque[Future[tuple[Tensor, Tensor, Tensor] | None]] = deque()
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

    def _batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor, Tensor] | None:
        found = [(int(index), image) for index in indices if (image := self._image(int(index))) is not None]
        if not found:
            return None
        images, positions = torch.stack([image for _, image in found]), torch.tensor([index for index, _ in found])
        return positions, images.pin_memory() if self._pin else images, self.labels[positions]

    def _image(self, index: int) -> Tensor | None:
        if index < len(self._cache) and self._is_cached[index]:
            return self._cache[index]
        item = self._items[index]
        try:
            loaded = load_item(item, self._shape)
        except Exception as error:  # a broken image must not affect the others
            reason = truncate_and_escape(f"{item if isinstance(item, Path) else f'image {index}'}: {error}")
            with self._lock:
                is_news = index not in self._unreadable and len(self._unreadable) < _SHOWN
                self._unreadable[index] = reason
            if is_news:
                logger.warning("skipped an unreadable image: %s", reason)
            return None
        if self._unreadable:
            with self._lock:
                self._unreadable.pop(index, None)
        if index < len(self._cache):
            self._cache[index] = loaded
            self._is_cached[index] = True
        return loaded


@dataclass(frozen=True)
class DataReport:
    """The result of checking a site's data."""

    class_counts: dict[str, int]
    test_counts: dict[str, int]
    problems: list[str] = field(default_factory=list)
    skipped: SkippedData = NOTHING_SKIPPED

    @property
    def nonzero_class_counts(self) -> dict[str, int]:
        """The class counts without zeros: a plan may have many more classes than a site."""
        return {name: count for name, count in self.class_counts.items() if count}

    @property
    def first_problems(self) -> list[str]:
        """The first few problems, enough to display."""
        return self.problems[:_SHOWN]

    @property
    def test_images(self) -> int:
        """Number of held-out images."""
        return sum(self.test_counts.values())

    @property
    def holdout(self) -> HoldoutSizes:
        """What the held-out images are used for."""
        return holdout_sizes(self.test_images)


@dataclass(frozen=True)
class SiteData:
    """Training and held-out images of a site."""

    train: SiteImages
    test: SiteImages
    report: DataReport

    def describe_cache(self) -> str:
        """Return how many images stay decoded in memory; empty if all of them do."""
        images = self.train.samples + self.test.samples
        uncached = self.train.uncached + self.test.uncached
        if not uncached:
            return ""
        return f"{images - uncached} of {images} images stay decoded in memory; the others are read in every pass"

    def describe_unreadable(self) -> str:
        """Return how many images were skipped when they were last read, and why; empty if none were."""
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
    skipped: SkippedData = NOTHING_SKIPPED,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    pin: bool = False,
    on_file: Callable[[int, int], None] = lambda _done, _total: None,
) -> SiteData:
    """Open a site's data for a plan; raise DataError with all problems, or skip them with `skip_bad`.

    `check_files` decodes every file once, to find broken ones before training rather than during it. What an earlier
    check `skipped` is skipped silently, except for files that have been repaired since.
    """
    check_class_map(class_map or {}, plan.classes)
    found = open_source(spec, plan.seed, plan.classes)
    split = found.renamed(class_map or {})
    known = set(plan.classes)
    held = {example.label for example in split.train + split.test}
    unknown = sorted(held - known)
    parts = [[example for example in part if example.label in known] for part in (split.train, split.test)]
    files = [one.item for one in parts[0] + parts[1] if isinstance(one.item, Path)]
    skipped_files, skipped_classes = set(skipped.files), set(skipped.classes)  # either can be long
    suspects = files if check_files else [file for file in files if str(file) in skipped_files]
    broken = _broken_files(suspects, plan.image, on_file)
    parts = [[example for example in part if example.item not in broken] for part in parts]
    problems = [f"class {name!r} has no images" for name in split.empty if name not in skipped_classes]
    unmapped = [name for name in unknown if name not in skipped_classes]
    problems += [
        f"class {name!r} is not in the plan{hint}"
        for name, hint in suggest_classes(unmapped, plan.classes, held).items()
    ]
    if check_files:
        problems += unused_names(class_map or {}, {*found.empty, *(one.label for one in found.train + found.test)})
    problems += [f"{path}: {reason}" for path, reason in broken.items() if str(path) not in skipped_files]
    if problems and not skip_bad:
        raise _misfit(spec, plan, problems, has_unknown=bool(unmapped))
    if not parts[0]:
        raise DataError(f"{spec} has no training images of the plan's classes.")
    budgets = _share_budget(cache_bytes, len(parts[0]), len(parts[1]))
    max_unreadable = unreadable_limit(len(parts[0]))
    train, test = (
        SiteImages(part, plan, cache_bytes=budget, pin=pin, max_unreadable=limit)
        for part, budget, limit in zip(parts, budgets, (max_unreadable, None), strict=True)
    )
    counts, test_counts = (
        dict(zip(plan.classes, count_classes(part.labels, len(plan.classes)).tolist(), strict=True))
        for part in (train, test)
    )
    left_out = SkippedData(files=tuple(map(str, broken)), classes=(*split.empty, *unknown))
    return SiteData(train, test, DataReport(counts, test_counts, problems, left_out))


def _misfit(spec: str, plan: FederationPlan, problems: list[str], *, has_unknown: bool) -> DataError:
    shown = "\n".join(f"  {line}" for line in problems[:_SHOWN])
    more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    advice = (
        f"Rename classes that have another name in the plan, or map them: {MAP_ADVICE}" if has_unknown else "Fix these."
    )
    return DataError(
        f"The data at {spec} does not match the plan:\n{shown}{more}\n"
        f"The plan's classes: {', '.join(plan.classes[:50])}",
        next_step=f"\n{advice}\nOr pass --skip-bad to skip everything listed here.",
    )


def _share_budget(cache_bytes: int, train: int, test: int) -> tuple[int, int]:
    train_bytes = cache_bytes * train // max(train + test, 1)
    return train_bytes, cache_bytes - train_bytes


def _broken_files(files: list[Path], shape: ImagePlan, on_file: Callable[[int, int], None]) -> dict[Path, str]:
    broken: dict[Path, str] = {}

    def check(file: Path) -> tuple[Path, str | None]:
        try:
            load_item(file, shape)
        except Exception as error:  # as in SiteImages
            return file, str(error)
        return file, None

    with ThreadPoolExecutor(4) as pool:
        for done, (file, reason) in enumerate(pool.map(check, files), start=1):
            on_file(done, len(files))
            if reason is not None:
                broken[file] = reason
    return broken
