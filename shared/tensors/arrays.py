"""numpy's arrays, which the coordinator computes with, and torch's tensors, which agents and the lab compute with.

torch is imported only to convert.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shared.tensors.names import Tensors

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Arrays = dict[str, Array]
_BFLOAT16 = "bfloat16"
_ALIGNMENT = 64  # of memory that torch allocates; with another one, the last digits of its results may differ


def dtype_named(name: str) -> "np.dtype[Any]":
    """Return the dtype with this name; numpy itself has no bfloat16."""
    if name != _BFLOAT16:
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def is_float(array: Array) -> bool:
    """Return whether the values are floating-point numbers."""
    return array.dtype.kind == "f" or array.dtype.name == _BFLOAT16


def rounded(values: Array, dtype: "np.dtype[Any]") -> Array:
    """Return float64 values in another dtype; in half precision they are rounded to float32 first, as torch does it."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype) if dtype.itemsize == 2 else values.astype(dtype)


def empty(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
    """Return an array with undefined values, in memory that torch can compute with as it is."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size_bytes].view(dtype).reshape(shape)


def memory_of(array: Array) -> memoryview:
    """Return the bytes of an array, which are its own memory if it is contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def as_array(value: "Tensor | Array") -> Array:
    """Return an array with the memory of a torch tensor on the CPU; arrays are returned unchanged."""
    if isinstance(value, np.ndarray):
        return value
    plain = value.detach().cpu()
    if str(plain.dtype) != f"torch.{_BFLOAT16}":
        return plain.numpy()
    import torch

    return plain.contiguous().view(torch.int16).numpy().view(dtype_named(_BFLOAT16))


def as_arrays(tensors: "Mapping[str, Tensor | Array]") -> Arrays:
    """Return arrays with the memory of these tensors."""
    return {name: as_array(value) for name, value in tensors.items()}


def as_tensors(arrays: "Mapping[str, Tensor | Array]") -> Tensors:
    """Return torch tensors, which share the arrays' memory where torch could have allocated it."""
    return {name: as_tensor(value) for name, value in arrays.items()}


def as_tensor(array: "Tensor | Array") -> "Tensor":
    """Return a torch tensor; see `as_tensors`."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    is_brain = array.dtype.name == _BFLOAT16
    plain = array.view(np.int16) if is_brain else array
    usable = plain.size and plain.flags.c_contiguous and plain.flags.writeable and plain.ctypes.data % _ALIGNMENT == 0
    if usable:
        tensor = torch.from_numpy(plain)
    else:
        tensor = torch.empty(plain.shape, dtype=getattr(torch, plain.dtype.name))
        np.copyto(tensor.numpy(), plain)
    return tensor.view(torch.bfloat16) if is_brain else tensor
