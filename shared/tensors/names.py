"""Named tensors and the prefixes that distinguish their kinds."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
Value = TypeVar("Value")
SHARED, PERSONAL = "shared.", "personal."  # distinguish an update's tensors on the wire


def add_prefix(tensors: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Return the tensors with the prefix added to each name."""
    return {prefix + name: value for name, value in tensors.items()}


def strip_prefix(tensors: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """Return the tensors whose names start with the prefix, with the prefix removed."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
