"""From an image to the tensor that the plan asks for: the single path shared by training and `/predict`."""

import io
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
import torchvision.transforms.v2.functional as transforms
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from client_agent.errors import DataError
from shared.contract.plan import ImagePlan
from shared.learning.preprocessing import normalize

TRAINING_FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
PREDICT_FORMATS = ("PNG", "JPEG")
MAX_PIXELS = 64_000_000
# `open_image` checks the size itself. Pillow would warn about images that are refused anyway, and warnings cannot be
# silenced for a single thread: warnings.catch_warnings changes the filters of the whole process.
Image.MAX_IMAGE_PIXELS = None


class TooManyPixels(DataError):
    """An image too large to decode."""

    code = "too-many-pixels"


def decode(data: bytes | Path, formats: Collection[str], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an image and turn it upright; raise DataError if it is unusable, before decoding if it is too large."""
    return load(open_image(data, formats, max_pixels))


def open_image(data: bytes | Path, formats: Collection[str], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read only an image's header; raise DataError if it is unusable or too large."""
    try:
        source = io.BytesIO(data if isinstance(data, bytes) else data.read_bytes())
    except OSError as error:
        raise DataError(f"It cannot be read: {error.strerror}.") from error
    try:
        image: Image.Image = Image.open(source, formats=list(formats))
    except UnidentifiedImageError as error:
        raise DataError(f"Unsupported image format; use {', '.join(formats)}.") from error
    except Exception as error:  # Pillow raises almost anything for malformed bytes
        raise DataError(f"It cannot be decoded: {error}.") from error
    if image.width * image.height > max_pixels:
        raise TooManyPixels(f"It has {image.width}×{image.height} pixels; at most {max_pixels} are allowed.")
    return image


def load(image: Image.Image) -> Image.Image:
    """Decode the pixels of an opened image and turn it upright."""
    try:
        image.load()
        return ImageOps.exif_transpose(image)
    except Exception as error:  # as above
        raise DataError(f"It cannot be decoded: {error}.") from error


def to_tensor(image: Image.Image, shape: ImagePlan) -> Tensor:
    """Return an image as (C, H, W), resized and normalized; 16-bit depth is kept, transparency becomes black."""
    if shape.channels not in (1, 3):
        raise DataError(f"Image files have 1 or 3 channels; the plan asks for {shape.channels}. Use an .npz file.")
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):
        pixels = torch.from_numpy(np.asarray(image).astype(np.float32) / 65535).clamp(0, 1)[None]
        pixels = pixels.expand(shape.channels, -1, -1)
    elif image.mode == "F":
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)).clamp(0, 1)[None].expand(shape.channels, -1, -1)
    else:
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
        image = image.convert("L" if shape.channels == 1 else "RGB")
        pixels = transforms.to_dtype(transforms.pil_to_tensor(image), torch.float32, scale=True)
    return resize_and_normalize(pixels, shape)


def resize_and_normalize(pixels: Tensor, shape: ImagePlan) -> Tensor:
    """Bring pixels (C, h, w) in [0, 1] into the plan's form; bilinear without antialiasing, like the paper's code."""
    if pixels.shape[-2:] != (shape.height, shape.width):
        pixels = transforms.resize(pixels, [shape.height, shape.width], antialias=False)
    return normalize(pixels, shape.mean, shape.std).contiguous()
