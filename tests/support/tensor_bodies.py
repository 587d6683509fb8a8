"""Tensors and safetensors bodies, valid and hand-made, for tests of the wire format."""

import json
import struct
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from shared.tensors.checker import Checker
from shared.tensors.spec import Entry, Spec
from shared.tensors.wire import encode

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", "'", "a.b", "größe", "名前", "🦉", "\u0000", "dtype", ""]
)
names = texts.filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 3), max_size=3)
metadata_tables = st.dictionaries(texts, texts, max_size=4)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    """Draw a small tensor."""
    shape, dtype = draw(shapes), draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (0, 128)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


tensor_sets = st.dictionaries(names, tensors(), max_size=5)


def body(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a hand-made body; a header given as bytes is used verbatim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    """Return a tensor's entry in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def check(data: bytes, spec: Spec) -> dict[str, str]:
    """Check a whole body and return its metadata."""
    checker = Checker(spec)
    checker.feed(data)
    return checker.finish()


PAIR = Spec({"w": Entry((2,), "F32")})
PAIR_DATA = struct.pack("<2f", 1.5, -2.5)

MIXED = {
    "conv.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "steps": torch.tensor(41),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([[3.0]], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 4),
}
MIXED_SPEC = Spec.of(MIXED)
MIXED_BODY = encode(MIXED, {"round": "3"})
_length = int.from_bytes(MIXED_BODY[:8], "little")
MIXED_HEADER, MIXED_DATA = MIXED_BODY[8 : 8 + _length], MIXED_BODY[8 + _length :]
