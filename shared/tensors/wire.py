"""Tensors on the wire: safetensors in one canonical form, and digests.

    8 bytes: header length │ header: JSON {name: {dtype, shape, data_offsets}, "__metadata__": {…}} │ data, no gaps

numpy is imported only to encode and decode, not for digests.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shared.tensors.checker import Checker
from shared.tensors.spec import Entry, Spec, wire_name_of

if TYPE_CHECKING:
    from torch import Tensor

    from shared.tensors.arrays import Array, Arrays

# The library's order of tensors: by dtype in this order, then by name.
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL")


class Encoded:
    """Tensors in wire format, in pieces: the header, then each tensor's own memory, so that no copy is made."""

    def __init__(
        self, tensors: "Mapping[str, Array] | Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None
    ) -> None:
        from shared.tensors.arrays import as_arrays

        arrays = as_arrays(tensors)
        names = sorted(arrays, key=lambda name: (_ORDER.index(wire_name_of(arrays[name])), name))
        self._arrays = [arrays[name] for name in names]
        self._header = _header({name: arrays[name] for name in names}, metadata or {})
        self.size_bytes = len(self._header) + sum(array.nbytes for array in self._arrays)

    def pieces(self, max_bytes: int) -> "Iterator[bytes | memoryview]":
        """Yield the bytes in order, in pieces of at most this size."""
        from shared.tensors.arrays import memory_of

        yield self._header
        for array in self._arrays:
            data = memory_of(array)
            for begin in range(0, len(data), max_bytes):
                yield data[begin : begin + max_bytes]


def _header(arrays: "Arrays", metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": wire_name_of(array), "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encode(tensors: "Mapping[str, Array] | Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode tensors as safetensors; the same tensors and metadata always give the same bytes."""
    encoded = Encoded(tensors, metadata)
    return b"".join(encoded.pieces(max(encoded.size_bytes, 1)))


def decode(data: bytes, spec: Spec) -> "tuple[Arrays, dict[str, str]]":
    """Return the tensors and metadata of a body that matches the spec. Raise a WireError for any other.

    The arrays are read-only views of the data.
    """
    checker = Checker(spec)
    checker.feed(data)
    metadata = checker.finish()
    return parse(data), metadata


def parse(data: bytes | bytearray | memoryview) -> "Arrays":
    """Return the tensors of a body that has been checked before, as views of the data."""
    import numpy as np

    layout = Layout.read(data)
    return {
        name: np.frombuffer(data, entry.dtype, entry.size_bytes // entry.item_bytes, layout.starts[name]).reshape(
            entry.shape
        )
        for name, entry in layout.spec.entries.items()
    }


class Layout:
    """What the header of a body says: the tensors' names, shapes and dtypes, and where each one's bytes begin."""

    def __init__(self, spec: Spec, starts: Mapping[str, int], metadata: Mapping[str, str]) -> None:
        self.spec, self.starts, self.metadata = spec, starts, metadata

    @staticmethod
    def header_bytes(beginning: bytes | bytearray | memoryview) -> int:
        """Return where the header ends, from the first 8 bytes of a body."""
        return 8 + int.from_bytes(beginning[:8], "little")

    @classmethod
    def read(cls, beginning: bytes | bytearray | memoryview) -> "Layout":
        """Read the header of a body that has been checked before; tensors are in the order of their bytes."""
        end = cls.header_bytes(beginning)
        header: dict[str, Any] = json.loads(bytes(beginning[8:end]))
        metadata = header.pop("__metadata__", {})
        found = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        entries = {name: Entry(tuple(entry["shape"]), entry["dtype"]) for name, entry in found}
        return cls(Spec(entries), {name: end + entry["data_offsets"][0] for name, entry in found}, metadata)


def read_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata of a body that has been checked."""
    metadata: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    return metadata


def digest(data: bytes) -> str:
    """Return the hexadecimal SHA-256 of a body."""
    return hashlib.sha256(data).hexdigest()


def digest_header(hexadecimal: str) -> str:
    """Format a digest for the Content-Digest and Repr-Digest headers (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(hexadecimal)).decode()}:"
