"""From images to tensors in the plan's form."""

import io
import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from client_agent.data.images import PREDICT_FORMATS, TRAINING_FORMATS, TooManyPixels, decode, to_tensor
from client_agent.errors import DataError
from shared.contract.plan import ImagePlan

GREY = ImagePlan(channels=1, height=4, width=4, mean=(0.0,), std=(1.0,))
COLOUR = ImagePlan(channels=3, height=4, width=4, mean=(0.0,), std=(1.0,))


def png(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def test_gray_pixels_span_zero_to_one() -> None:
    pixels = np.array([[0, 255], [51, 102]], dtype=np.uint8)
    tensor = to_tensor(
        decode(png(Image.fromarray(pixels)), PREDICT_FORMATS),
        ImagePlan(channels=1, height=2, width=2, mean=(0.0,), std=(1.0,)),
    )
    assert torch.allclose(tensor, torch.tensor([[[0.0, 1.0], [0.2, 0.4]]]))


def test_pixels_are_normalized_with_the_plans_mean_and_std() -> None:
    white = Image.new("RGB", (4, 4), (255, 255, 255))
    plan = ImagePlan(channels=3, height=4, width=4, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    assert to_tensor(white, plan)[:, 0, 0].tolist() == [1.0, 3.0, 1.0]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
@pytest.mark.parametrize("shape", [GREY, COLOUR])
def test_every_mode_becomes_the_plans_shape(mode: str, shape: ImagePlan) -> None:
    tensor = to_tensor(
        Image.new("L", (7, 5), 128).convert("F" if mode == "F" else "L").convert(mode)
        if mode not in ("I;16",)
        else Image.new("I;16", (7, 5), 30000),
        shape,
    )
    assert tensor.shape == shape.shape
    assert tensor.dtype == torch.float32
    assert tensor.isfinite().all()


def test_sixteen_bits_are_not_cut_to_eight() -> None:
    depth = Image.fromarray(np.array([[1000, 1001]], dtype=np.uint16))
    tensor = to_tensor(
        decode(png(depth), PREDICT_FORMATS), ImagePlan(channels=1, height=1, width=2, mean=(0.0,), std=(1.0,))
    )
    assert torch.allclose(tensor.flatten() * 65535, torch.tensor([1000.0, 1001.0]), atol=1e-2)


def test_transparent_pixels_become_black() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 255, 255, 0))
    assert to_tensor(clear, COLOUR).abs().max() == 0


def test_transparent_palette_colors_become_black() -> None:
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0] * 256)
    tensor = to_tensor(decode(png(palette, transparency=1), PREDICT_FORMATS), COLOUR)
    assert tensor[:, 0, 0].tolist() == [1.0, 0.0, 0.0]


def test_exif_rotation_is_applied() -> None:
    image = Image.fromarray(np.array([[0, 255]], dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    turned = decode(png(image, exif=exif), PREDICT_FORMATS)
    assert turned.size == (1, 2)


def test_odd_sizes_are_resized() -> None:
    assert to_tensor(Image.new("RGB", (101, 13)), COLOUR).shape == (3, 4, 4)


def test_image_files_are_refused_for_plans_with_other_channel_counts() -> None:
    with pytest.raises(DataError, match="asks for 4"):
        to_tensor(Image.new("RGB", (4, 4)), ImagePlan(channels=4, height=4, width=4))


def test_a_truncated_file_is_refused() -> None:
    whole = png(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)))
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(whole[: len(whole) // 2], PREDICT_FORMATS)


@pytest.mark.parametrize("data", [b"", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"GIF89a", b"\x00" * 100])
def test_bytes_that_are_not_an_image_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        decode(data, PREDICT_FORMATS)


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG file with very many black pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    squeezer = zlib.compressobj(9)
    rows = b"".join(squeezer.compress(bytes(1 + width // 8)) for _ in range(height)) + squeezer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    data = bomb(10_000, 10_000)
    assert len(data) < 100_000
    with pytest.raises(TooManyPixels, match="10000×10000"):
        decode(data, PREDICT_FORMATS, max_pixels=25_000_000)


def test_pgm_and_tiff_are_accepted_for_training_but_not_for_predict(tmp_path: Path) -> None:
    for suffix in ("pgm", "tiff"):
        file = tmp_path / f"x.{suffix}"
        Image.new("L", (4, 4), 7).save(file)
        assert to_tensor(decode(file, TRAINING_FORMATS), GREY).shape == (1, 4, 4)
        with pytest.raises(DataError, match="PNG, JPEG"):
            decode(file.read_bytes(), PREDICT_FORMATS)


def test_decoding_does_not_affect_warnings_in_other_threads(tmp_path: Path) -> None:
    """Filters are process-wide, so they must not change while a thread reads an image."""
    slow = tmp_path / "slow.png"
    os.mkfifo(slow)
    before = list(warnings.filters)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(decode, slow, PREDICT_FORMATS)
        with slow.open("wb"):  # returns once the other end is open too
            assert list(warnings.filters) == before
        with pytest.raises(DataError):
            reading.result()
