"""Compressed updates: the difference to the round's model in fewer bits; what rounding leaves out is sent later.

Only float32 tensors with two or more dimensions are compressed: the weights of convolutions and linear layers, nearly
all of an update. Vectors stay exact: a rounded running variance could fall below zero. On the wire, NAME becomes

    bf16    NAME: BF16, the same shape
    int8    NAME: I8, the same shape; NAME.scales: F32, one for each block of 256 values
    int4    NAME: U8, two values per byte, the first in the lower four bits; NAME.scales: F32, one for each 64 values

so that the plan alone determines the size of an update. A value is its integer times the scale of its block. Nothing is
drawn at random, and every step is one float32 operation, so both sides get the same bits on any machine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.contract.errors import WireError
from shared.contract.plan import UpdateCompression
from shared.tensors.arrays import Array, Arrays, dtype_named
from shared.tensors.names import SHARED
from shared.tensors.spec import Entry, Spec

Floats = npt.NDArray[np.float32]
_SCALES = ".scales"  # no tensor is called that: a module cannot have a parameter and a submodule of one name
_LARGEST = np.finfo(np.float32).max
_SMALLEST_SCALE = np.finfo(np.float32).tiny  # smaller ones are not precise; such blocks are sent as zeros


@dataclass(frozen=True)
class _Integers:
    """How values become integers: the largest one, and how many values share a scale."""

    largest: int
    block: int


_INTEGERS = {"int8": _Integers(127, 256), "int4": _Integers(7, 64)}


def compressed_spec(spec: Spec, compression: UpdateCompression) -> Spec:
    """Return the spec of a compressed update; `spec` is that of the same update without compression."""
    entries: dict[str, Entry] = {}
    for name, entry in spec.entries.items():
        is_compressed = name.startswith(SHARED) and _is_compressed(entry.wire_name, entry.shape)
        entries |= _wire_entries(name, entry.shape, compression) if is_compressed else {name: entry}
    return Spec(entries, spec.max_metadata_bytes)


def _wire_entries(name: str, shape: tuple[int, ...], compression: UpdateCompression) -> dict[str, Entry]:
    if compression == "none":
        return {name: Entry(shape, "F32")}
    if compression == "bf16":
        return {name: Entry(shape, "BF16")}
    size = math.prod(shape)
    values = Entry((-(-size // 2),), "U8") if compression == "int4" else Entry(shape, "I8")
    return {name: values, name + _SCALES: Entry((-(-size // _INTEGERS[compression].block),), "F32")}


def compress(
    trained: Mapping[str, Array],
    base: Mapping[str, Array],
    residual: Mapping[str, Array],
    compression: UpdateCompression,
) -> tuple[Arrays, Arrays]:
    """Return what to upload for the trained tensors, and the residual: what that leaves out.

    `base` is the model that the round started from, `residual` what earlier uploads left out; its tensors of another
    shape are ignored. Raise a WireError if a tensor is not finite.
    """
    sent, left = Arrays(), Arrays()
    for name, value in trained.items():
        if compression == "none" or not _is_compressed_array(value):
            sent[name] = value
            continue
        wanted, start = value, base[name]
        with np.errstate(over="ignore", invalid="ignore"):
            if name in residual and residual[name].shape == value.shape:
                wanted = wanted + residual[name]
            delta = wanted - start
        if not np.isfinite(delta).all():
            raise WireError(
                f"Tensor {name!r} contains a value that is not finite or far too large.",
                next_step="If training diverged, lower the learning rate.",
            )
        encoded = _encode(name, delta, compression)
        sent |= encoded
        left[name] = wanted - _restored(name, encoded, start, compression)
    return sent, left


def restore(
    uploaded: Mapping[str, Array], base: Mapping[str, Array], compression: UpdateCompression
) -> Mapping[str, Array]:
    """Return the tensors that an upload stands for; they are finite for any upload that a checker accepts."""
    if compression == "none":
        return uploaded
    tensors = Arrays()
    for name, value in uploaded.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) in uploaded:
            continue
        start = base[name]
        tensors[name] = _restored(name, uploaded, start, compression) if _is_compressed_array(start) else value
    return tensors


def _is_compressed(wire_name: str, shape: tuple[int, ...]) -> bool:
    return wire_name == "F32" and len(shape) > 1


def _is_compressed_array(array: Array) -> bool:
    return array.dtype == np.float32 and array.ndim > 1


def _encode(name: str, delta: Floats, compression: UpdateCompression) -> Arrays:
    if compression == "bf16":
        return {name: _to_bfloat16(delta)}
    largest, block = _INTEGERS[compression].largest, _INTEGERS[compression].block
    blocks = np.zeros((-(-delta.size // block), block), np.float32)
    blocks.reshape(-1)[: delta.size] = delta.reshape(-1)
    scales = np.abs(blocks).max(axis=1, initial=0) / np.float32(largest)
    scales[scales < _SMALLEST_SCALE] = 0
    blocks /= np.where(scales == 0, np.float32(1), scales)[:, None]
    integers = np.rint(blocks, out=blocks).astype(np.int8).reshape(-1)
    if compression == "int8":
        return {name: integers[: delta.size].reshape(delta.shape), name + _SCALES: scales}
    nibbles = integers[: delta.size + delta.size % 2].view(np.uint8) & 0x0F
    return {name: nibbles[::2] | nibbles[1::2] << 4, name + _SCALES: scales}


def _restored(name: str, encoded: Mapping[str, Array], start: Floats, compression: UpdateCompression) -> Floats:
    """Return the model's tensor plus the decoded difference, limited to finite numbers."""
    with np.errstate(over="ignore"):  # a hostile scale
        total = _decode(name, encoded, start.size, compression)
        total += start.reshape(-1)
    return np.clip(total, -_LARGEST, _LARGEST, out=total).reshape(start.shape)


def _decode(name: str, encoded: Mapping[str, Array], size: int, compression: UpdateCompression) -> Floats:
    values = encoded[name].reshape(-1)
    if compression == "bf16":
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if compression == "int4":
        values = np.stack([values << 4, values & 0xF0], axis=1).reshape(-1).view(np.int8) >> 4
    scales = encoded[name + _SCALES]
    decoded = np.zeros((scales.size, _INTEGERS[compression].block), np.float32)
    decoded.reshape(-1)[:size] = values[:size]
    decoded *= scales[:, None]
    return decoded.reshape(-1)[:size]


def _to_bfloat16(values: Floats) -> Array:
    """Round to the nearest bfloat16, ties to even, but never up to infinity."""
    bits = values.reshape(-1).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    rounded -= (rounded & 0x7FFF) == 0x7F80
    return rounded.astype(np.uint16).view(dtype_named("bfloat16")).reshape(values.shape)
