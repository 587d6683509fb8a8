"""Specs: the names, shapes and dtypes of the tensors a body must hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shared.tensors.names import add_prefix

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from shared.tensors.arrays import Array

MAX_METADATA_BYTES = 64 * 1024
MAX_MODEL_METADATA_BYTES = 64 * 1024 * 1024  # a plan may have 100,000 classes with names of 128 characters
_MAX_BYTES_PER_ENTRY = 512  # header bytes per tensor, not counting its name
# safetensors' names of dtypes, with the names that numpy and torch share and the bytes per element.
WIRE_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_WIRE_NAMES = {name: wire_name for wire_name, (name, _) in WIRE_DTYPES.items()}


def wire_name_of(value: "Tensor | Array") -> str:
    """Return the name of a tensor's or array's dtype in safetensors."""
    return _WIRE_NAMES[str(value.dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class Entry:
    """The shape of one tensor, and the name of its dtype in safetensors."""

    shape: tuple[int, ...]
    wire_name: str

    @property
    def dtype(self) -> "np.dtype[Any]":
        """numpy's dtype."""
        from shared.tensors.arrays import dtype_named

        return dtype_named(WIRE_DTYPES[self.wire_name][0])

    @property
    def item_bytes(self) -> int:
        """Size of one element."""
        return WIRE_DTYPES[self.wire_name][1]

    @property
    def size_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Spec:
    """The tensors a body must hold: exactly these names, shapes and dtypes."""

    entries: Mapping[str, Entry]
    max_metadata_bytes: int = MAX_METADATA_BYTES

    @classmethod
    def of(cls, tensors: "Mapping[str, Tensor] | Mapping[str, Array]") -> "Spec":
        """Return the spec of these tensors or arrays; tensors may be on the meta device."""
        return cls({name: Entry(tuple(value.shape), wire_name_of(value)) for name, value in tensors.items()})

    def of_model(self) -> "Spec":
        """Return the spec of a published model, whose metadata contains the entire plan."""
        return replace(self, max_metadata_bytes=MAX_MODEL_METADATA_BYTES)

    def prefixed(self, prefix: str) -> "Spec":
        """Return the spec with the prefix added to each name."""
        return Spec(add_prefix(self.entries, prefix))

    def __or__(self, other: "Spec") -> "Spec":
        return Spec({**self.entries, **other.entries})

    @cached_property
    def data_bytes(self) -> int:
        """Size of all tensors' data."""
        return sum(entry.size_bytes for entry in self.entries.values())

    @cached_property
    def max_header_bytes(self) -> int:
        """The longest header a checker accepts."""
        names = sum(6 * len(name) + _MAX_BYTES_PER_ENTRY for name in self.entries)
        return names + 6 * self.max_metadata_bytes + 64

    @cached_property
    def max_total_bytes(self) -> int:
        """The largest possible body."""
        return 8 + self.max_header_bytes + self.data_bytes
