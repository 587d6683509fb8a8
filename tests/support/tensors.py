"""Comparing sets of named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.tensors.arrays import Array, as_tensors

Named = Mapping[str, Tensor] | Mapping[str, Array]


def assert_same_tensors(found: Named, expected: Named) -> None:
    """Fail unless names, types, shapes and values are the same to the bit: NaN equals NaN, and 0 differs from −0."""
    found, expected = as_tensors(found), as_tensors(expected)
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not _same(found[name], value)]
    assert not different, f"different tensors: {', '.join(different)}"


def differ(one: Named, other: Named) -> bool:
    """Return whether any tensor of `one` has another value in `other`."""
    one, other = as_tensors(one), as_tensors(other)
    return any(not torch.equal(one[name], other[name]) for name in one)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
