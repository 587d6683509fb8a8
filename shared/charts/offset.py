"""Pictures of offsets: blue below zero, white at zero, red above, one picture per channel."""

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.charts.chart import Chart, Table
from shared.charts.formats import plain
from shared.charts.svg import element, picture

_BLUE, _WHITE, _RED = (33, 102, 172), (247, 247, 247), (178, 24, 43)
_SIDE, _GAP, _FOOT = 176.0, 12.0, 30.0
_MAX_PIXELS = 64  # per side of a picture
_MAX_CHANNELS = 3


def offset_picture(title: str, offset: NDArray[Any], motion: float | None = None) -> Chart:
    """Return pictures of the channels of an offset (channels × height × width) on one scale around zero."""
    values = np.nan_to_num(np.asarray(offset, dtype=np.float64), posinf=0.0, neginf=0.0)
    if values.ndim != 3 or not values.size:
        raise ValueError(f"an offset has channels × height × width, not {values.shape}")
    low, high, norm = float(values.min()), float(values.max()), float(np.linalg.norm(values))
    largest = max(abs(low), abs(high))
    channels = values[:_MAX_CHANNELS]
    side = _SIDE if len(channels) > 1 else 2 * _SIDE
    names = (
        ("red", "green", "blue")
        if len(values) == 3
        else tuple(f"channel {index + 1}" for index in range(len(channels)))
    )
    parts = []
    for index, channel in enumerate(channels):
        x = index * (side + _GAP)
        parts.append(
            element(
                "image", href=_png(_colors(_reduced(channel), largest)), x=x, y=0, width=side, height=side,
                image_rendering="pixelated",
            )
        )  # fmt: skip
        label = names[index] if len(channels) > 1 else f"{plain(-largest)} blue … {plain(largest)} red"
        parts.append(element("text", label, x=x + side / 2, y=side + 20, text_anchor="middle", class_="tick"))
    facts = {"minimum": low, "maximum": high, "norm": norm}
    if motion is not None:
        facts["motion"] = motion
    note = ", ".join(f"{name} {plain(value)}" for name, value in facts.items())
    width = len(channels) * (side + _GAP) - _GAP
    shape = " × ".join(map(str, values.shape))
    svg = picture(width, side + _FOOT, f"Picture of an offset: {title}. {shape}; {note}.", *parts, kind="offset")
    return Chart(
        title, svg, Table(["of the offset", "value"], [[name, plain(value)] for name, value in facts.items()]), note
    )


def _reduced(channel: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of blocks, at most `_MAX_PIXELS` per side: pages stay small."""
    for axis in (0, 1):
        size = channel.shape[axis]
        if size > _MAX_PIXELS:
            edges = np.linspace(0, size, _MAX_PIXELS, endpoint=False).astype(int)
            widths = np.diff([*edges, size])
            sums = np.add.reduceat(channel, edges, axis=axis)
            channel = sums / (widths[:, None] if axis == 0 else widths[None, :])
    return channel


def _colors(channel: NDArray[np.float64], largest: float) -> NDArray[np.uint8]:
    share = channel / largest if largest else channel * 0
    away = np.abs(share)[..., None]
    ends = np.where(share[..., None] < 0, np.array(_BLUE), np.array(_RED))
    return np.asarray(np.rint(np.array(_WHITE) * (1 - away) + ends * away), dtype=np.uint8)


def _png(pixels: NDArray[np.uint8]) -> str:
    """Return pixels (height × width × 3) as the URI of a PNG."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()
