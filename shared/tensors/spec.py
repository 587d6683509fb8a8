"""Specs: the names, shapes and dtypes of the tensors a body must hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shared.tensors.names import add_prefix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_METADATA_BYTES = 64 * 1024
MAX_MODEL_METADATA_BYTES = 64 * 1024 * 1024  # a plan may have 100,000 classes with names of 128 characters
_MAX_BYTES_PER_ENTRY = 512  # header bytes per tensor, not counting its name
# safetensors' names for torch's dtypes.
_WIRE_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def dtype_of(wire_name: str) -> "torch.dtype":
    """Return the dtype with this name in safetensors."""
    import torch

    (name,) = (name for name, known in _WIRE_NAMES.items() if known == wire_name)
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


@dataclass(frozen=True)
class Entry:
    """The shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"

    @property
    def wire_name(self) -> str:
        """The dtype's name in safetensors."""
        return _WIRE_NAMES[str(self.dtype)]

    @property
    def size_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Spec:
    """The tensors a body must hold: exactly these names, shapes and dtypes."""

    entries: Mapping[str, Entry]
    max_metadata_bytes: int = MAX_METADATA_BYTES

    @classmethod
    def of(cls, tensors: "Mapping[str, Tensor]") -> "Spec":
        """Return the spec of these tensors, which may be on the meta device."""
        return cls({name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})

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
