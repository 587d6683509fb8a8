"""Scanners: how a site's images differ from the other sites', in the files that a split writes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from client_agent.data.images import TRAINING_FORMATS, decode
from client_agent.data.splits import Item
from lab.datasets.clients import Shift, shifted
from shared.contract.errors import DistransError, SplitError

Pixels = NDArray[np.uint8] | NDArray[np.uint16]  # (h, w), or (h, w, 3)
_DEEP = ("I;16", "I;16B", "I;16L", "I")  # modes of 16-bit images, as the agent reads them


@dataclass(frozen=True)
class Scanner:
    """The scanner of the site with this number, from 0: what `lab.datasets.clients.shifted` does to its images."""

    shift: Shift
    number: int

    @property
    def name(self) -> str:
        """What it does to images: `plain`, `inverted`, `90°`; turns are counterclockwise."""
        if self.shift == "rotated" and self.number % 4:
            return f"{90 * (self.number % 4)}°"
        return "inverted" if self.shift == "inverted" and self.number % 2 else "plain"

    @property
    def changes_images(self) -> bool:
        """Whether its images differ from the originals."""
        return self.name != "plain"

    def scan(self, item: Item) -> Pixels:
        """Return the image as this scanner shows it; raise SplitError if it cannot be decoded."""
        pixels = _file_pixels(item) if isinstance(item, Path) else _array_pixels(item)
        if pixels.dtype == np.uint16:  # wider than what `shifted` works on
            return self._scan_deep(pixels)
        images = torch.from_numpy(np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1)))
        changed = shifted(images[None], self.shift, self.number)[0].permute(1, 2, 0)
        return changed.squeeze(2).numpy() if pixels.ndim == 2 else changed.numpy()

    def _scan_deep(self, pixels: Pixels) -> Pixels:
        if self.shift == "rotated":
            return np.rot90(pixels, self.number)
        return np.iinfo(np.uint16).max - pixels if self.changes_images else pixels


PLAIN = Scanner("none", 0)


def _array_pixels(item: torch.Tensor) -> Pixels:
    pixels: NDArray[np.uint8] = (item * 255).round().byte().permute(1, 2, 0).numpy()
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def _file_pixels(file: Path) -> Pixels:
    """Return an image file's pixels as an agent would see them; transparency becomes black."""
    try:
        image = decode(file, TRAINING_FORMATS)
    except DistransError as error:
        raise SplitError(
            f"Cannot change {file}: {error.message}", next_step="Fix or remove the file, or use --shift none."
        ) from error
    if image.mode in _DEEP:
        return np.asarray(image).clip(0, np.iinfo(np.uint16).max).astype(np.uint16)
    if image.mode == "F":
        return (np.asarray(image).clip(0, 1) * np.iinfo(np.uint16).max).round().astype(np.uint16)
    is_gray = image.mode in ("1", "L", "LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return np.array(image.convert("L" if is_gray else "RGB"))
