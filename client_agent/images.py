"""From any image to the tensor that the plan asks for: the one path that training and `/predict` share."""

import io
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
import torchvision.transforms.v2.functional as transforms
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from client_agent.errors import DataError
from shared.offsets import normalise
from shared.plan import ImagePlan

TRAINING_FORMATS = ("PNG", "JPEG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
PREDICT_FORMATS = ("PNG", "JPEG")
MAX_PIXELS = 64_000_000
# `open_image` checks the size itself. Pillow would warn of images that are refused anyway, and a warning cannot be
# silenced for one thread alone: warnings.catch_warnings changes the filters of the whole process.
Image.MAX_IMAGE_PIXELS = None


class TooManyPixels(DataError):
    """An image larger than is decoded."""

    code = "too-many-pixels"


def decode(data: bytes | Path, formats: Collection[str], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An upright image; its size is checked before a pixel is decoded. DataError says what is wrong with any other."""
    return load(open_image(data, formats, max_pixels))


def open_image(data: bytes | Path, formats: Collection[str], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An image of which only the header was decoded, and that is not too large to `load`."""
    try:
        source = io.BytesIO(data if isinstance(data, bytes) else data.read_bytes())
    except OSError as error:
        raise DataError(f"It cannot be read: {error.strerror}.") from error
    try:
        image: Image.Image = Image.open(source, formats=list(formats))
    except UnidentifiedImageError as error:
        raise DataError(f"Unsupported image format; {', '.join(formats)} can be used.") from error
    except Exception as error:  # Pillow raises nearly anything for bytes that it did not expect
        raise DataError(f"It cannot be decoded: {error}.") from error
    if image.width * image.height > max_pixels:
        raise TooManyPixels(f"It has {image.width}×{image.height} pixels; at most {max_pixels} are allowed.")
    return image


def load(image: Image.Image) -> Image.Image:
    """The pixels of an opened image, upright."""
    try:
        image.load()
        return ImageOps.exif_transpose(image)
    except Exception as error:  # as above
        raise DataError(f"It cannot be decoded: {error}.") from error


def to_tensor(image: Image.Image, shape: ImagePlan) -> Tensor:
    """(C, H, W), resized and normalised as the plan says. 16-bit depth is kept; transparency lies on black."""
    if shape.channels not in (1, 3):
        raise DataError(f"Image files have 1 or 3 channels, the plan asks for {shape.channels}; use an .npz file.")
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
    return fit(pixels, shape)


def fit(pixels: Tensor, shape: ImagePlan) -> Tensor:
    """Pixels (C, h, w) in [0, 1] at the plan's size, normalised. Bilinear without antialiasing, as the paper's code."""
    if pixels.shape[-2:] != (shape.height, shape.width):
        pixels = transforms.resize(pixels, [shape.height, shape.width], antialias=False)
    return normalise(pixels, shape.mean, shape.std).contiguous()
