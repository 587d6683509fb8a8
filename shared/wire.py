"""Tensors on the wire: safetensors bytes, checked against what the plan says they must be.

A `Spec` says which tensors a body must hold. `Checker` takes the body piece by piece, as it arrives, and refuses it at
the first byte that cannot be right, before anything of the size a stranger claims is allocated. `decode` is the checker
followed by the safetensors library. numpy and torch are loaded where values are touched, not for a digest or a spec.

    8 bytes: header length │ header: JSON {name: {dtype, shape, data_offsets}, "__metadata__": {…}} │ data, no gaps
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shared.limits import MAX_ABSOLUTE, MAX_INTEGER, MAX_WEIGHT
from shared.problems import WireError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Tensors = dict[str, "Tensor"]

MAX_METADATA_BYTES = 64 * 1024
MAX_MODEL_METADATA_BYTES = 64 * 1024 * 1024  # a plan may have 100,000 classes with names of 128 characters
_MAX_BYTES_PER_ENTRY = 512  # header bytes for one tensor beside its name
# What safetensors calls torch's dtypes.
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


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"

    @property
    def wire_name(self) -> str:
        """Its dtype, as safetensors names it."""
        return _WIRE_NAMES[str(self.dtype)]

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Spec:
    """The tensors a body must hold: these names, shapes and dtypes, all of them and no others."""

    entries: Mapping[str, Entry]
    max_metadata_bytes: int = MAX_METADATA_BYTES

    @classmethod
    def of(cls, tensors: "Mapping[str, Tensor]") -> "Spec":
        """The spec that exactly such tensors meet; tensors on the meta device will do."""
        return cls({name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})

    def of_model(self) -> "Spec":
        """The same tensors as a coordinator publishes them: a model's metadata holds the whole plan."""
        return replace(self, max_metadata_bytes=MAX_MODEL_METADATA_BYTES)

    def prefixed(self, prefix: str) -> "Spec":
        """The same tensors with `prefix` before each name."""
        return Spec({prefix + name: entry for name, entry in self.entries.items()})

    def __or__(self, other: "Spec") -> "Spec":
        return Spec({**self.entries, **other.entries})

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(entry.size_bytes for entry in self.entries.values())

    @property
    def max_header_bytes(self) -> int:
        """The longest header that is read."""
        names = sum(6 * len(name) + _MAX_BYTES_PER_ENTRY for name in self.entries)
        return names + 6 * self.max_metadata_bytes + 64

    @property
    def max_total_bytes(self) -> int:
        """No body that meets the spec is longer."""
        return 8 + self.max_header_bytes + self.data_bytes


def encode(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> bytes:
    """Safetensors bytes; the same tensors and metadata always give the same bytes."""
    import safetensors.torch

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    data = safetensors.torch.save(plain)
    # The library writes metadata in a random order; digests need one form, so the header is put together here.
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    entries = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
    full = {"__metadata__": dict(sorted(metadata.items())), **entries} if metadata else entries
    text = json.dumps(full, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def decode(data: bytes, spec: Spec) -> tuple[Tensors, dict[str, str]]:
    """The tensors and the metadata of a body that meets the spec; a WireError says what is wrong with any other."""
    import safetensors.torch

    checker = Checker(spec)
    checker.feed(data)
    metadata = checker.finish()
    return safetensors.torch.load(data), metadata


def digest(data: bytes) -> str:
    """The name of a body by its content: the hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def digest_header(hexadecimal: str) -> str:
    """A digest as RFC 9530's Content-Digest and Repr-Digest write it."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(hexadecimal)).decode()}:"


class Checker:
    """Takes a body in pieces of any size; holds its header and a few bytes, never its data.

    Where a body may take several forms, it must meet one of the specs.
    """

    def __init__(self, spec: Spec, *others: Spec) -> None:
        self._spec, self._others = spec, others
        self._max_header_bytes = max(one.max_header_bytes for one in (spec, *others))
        self._head = bytearray()
        self._header_end: int | None = None
        self._regions: list[tuple[int, str, Entry]] = []  # each with its end in the data and its name
        self._region = 0
        self._position = 0  # in the data
        self._carry = b""  # the first bytes of an element whose rest has not come yet
        self.metadata: dict[str, str] = {}

    def feed(self, piece: bytes | memoryview) -> None:
        """Check the next piece; raises at the first thing that cannot be right."""
        view = memoryview(piece)
        if self._header_end is None:
            view = self._feed_header(view)
        if self._header_end is not None and len(view):
            self._feed_data(view)

    def finish(self) -> dict[str, str]:
        """To be called when the body has ended: it must be whole. Returns the metadata."""
        if self._header_end is None:
            raise WireError("The body ends inside its header.", next_step="Send it again in full.")
        missing = self._spec.data_bytes - self._position
        if missing:
            raise WireError(f"The body ends {missing} bytes too early.", next_step="Send it again in full.")
        return self.metadata

    def _feed_header(self, view: memoryview) -> memoryview:
        wanted = 8 if len(self._head) < 8 else self._header_length()
        while len(view) and len(self._head) < wanted:
            taken = view[: wanted - len(self._head)]
            self._head += taken
            view = view[len(taken) :]
            if len(self._head) == 8:
                wanted = self._header_length()
        if len(self._head) >= 8 and len(self._head) == self._header_length():
            self._header_end = len(self._head)
            self._read_header(bytes(self._head[8:]))
        return view

    def _header_length(self) -> int:
        length = int.from_bytes(self._head[:8], "little")
        if not 2 <= length <= self._max_header_bytes:
            raise WireError(
                f"The header claims {length} bytes; at most {self._max_header_bytes} are allowed.",
                next_step="Send a safetensors body.",
            )
        return 8 + length

    def _read_header(self, text: bytes) -> None:
        try:
            header = json.loads(text.decode(), object_pairs_hook=_refuse_repeats, parse_int=_parse_int)
        except (ValueError, RecursionError) as error:
            raise WireError(
                "The header is not JSON with each key once.", next_step="Send a safetensors body."
            ) from error
        if not isinstance(header, dict) or text[:1] != b"{":
            raise WireError("The header is not a JSON object.", next_step="Send a safetensors body.")
        self.metadata = _checked_metadata(header.pop("__metadata__", {}), self._spec.max_metadata_bytes)
        self._spec = next((one for one in self._others if _fits(header, one)), self._spec)
        _refuse_names(header.keys(), self._spec.entries.keys())
        spans = []
        for name, found in header.items():
            start, end = _checked_entry(name, found, self._spec.entries[name])
            spans.append((start, end, name))
        position = 0
        for start, end, name in sorted(spans):
            if start != position:
                raise WireError(f"Tensor {name!r} starts at byte {start} of the data, not at {position}.")
            position = end
            self._regions.append((end, name, self._spec.entries[name]))

    def _feed_data(self, view: memoryview) -> None:
        if self._position + len(view) > self._spec.data_bytes:
            extra = self._position + len(view) - self._spec.data_bytes
            raise WireError(f"The body has at least {extra} bytes after its last tensor.")
        while len(view):
            end, name, entry = self._regions[self._region]
            if self._position == end:  # done, or an empty tensor
                self._region += 1
                continue
            taken = view[: end - self._position]
            self._position += len(taken)
            view = view[len(taken) :]
            data = self._carry + bytes(taken) if self._carry else taken
            whole = len(data) - len(data) % entry.dtype.itemsize
            _check_values(name, data[:whole], entry.wire_name)
            self._carry = bytes(data[whole:])


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key stands twice")
    return unique


def _parse_int(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)  # what the library reads it as; int would make a size of it


def _checked_metadata(found: Any, max_bytes: int) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise WireError("The metadata is not a table of texts.")
    try:
        size_bytes = sum(len(text.encode()) for item in found.items() for text in item)
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise WireError("The metadata is not proper Unicode.") from error
    if size_bytes > max_bytes:
        raise WireError(f"The metadata has more than {max_bytes} bytes.")
    return found


def _fits(header: dict[str, Any], spec: Spec) -> bool:
    """Whether the names and shapes are those of the spec; everything else is checked afterwards."""
    return header.keys() == spec.entries.keys() and all(
        isinstance(header[name], dict) and header[name].get("shape") == list(entry.shape)
        for name, entry in spec.entries.items()
    )


def _refuse_names(found: Any, expected: Any) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"lacks {len(missing)} tensors ({', '.join(map(repr, missing[:3]))} …)")
        if unknown:
            parts.append(f"has {len(unknown)} unknown ones ({', '.join(repr(name[:80]) for name in unknown[:3])} …)")
        raise WireError(
            f"The body {' and '.join(parts)}.", next_step="Is this the model of another plan or another version?"
        )


def _checked_entry(name: str, found: Any, expected: Entry) -> tuple[int, int]:
    if not isinstance(found, dict) or found.keys() != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"The header's entry for tensor {name!r} is malformed.")
    if found["dtype"] != expected.wire_name:
        raise WireError(f"Tensor {name!r} has dtype {str(found['dtype'])[:20]!r}, expected {expected.wire_name!r}.")
    if not _are_sizes(found["shape"]) or found["shape"] != list(expected.shape):
        raise WireError(f"Tensor {name!r} has shape {str(found['shape'])[:80]}, expected {list(expected.shape)}.")
    offsets = found["data_offsets"]
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != expected.size_bytes:
        raise WireError(f"Tensor {name!r} does not span the {expected.size_bytes} bytes of its shape.")
    return offsets[0], offsets[1]


def _are_sizes(found: Any) -> bool:
    # JSON's true and 1.0 equal 1 in Python, but are no sizes.
    return isinstance(found, list) and all(type(value) is int and value >= 0 for value in found)


def _check_values(name: str, data: bytes | memoryview, dtype: str) -> None:
    import numpy as np

    is_float = dtype in ("F64", "F32", "F16", "BF16")
    if dtype == "BF16":  # numpy has no bfloat16; an exponent of all ones is an infinity or a NaN
        good = bool(((np.frombuffer(data, np.uint16) & 0x7F80) != 0x7F80).all())
    elif dtype == "F64":
        good = bool((np.abs(np.frombuffer(data, np.float64)) < MAX_ABSOLUTE / MAX_WEIGHT).all())  # false for NaN too
    elif is_float:
        numbers = np.frombuffer(data, np.float32 if dtype == "F32" else np.float16)
        good = bool(np.isfinite(numbers).all())  # the largest of them is far below the limit
    elif dtype == "BOOL":
        good = bool((np.frombuffer(data, np.uint8) <= 1).all())
    elif dtype == "I64":
        integers = np.frombuffer(data, np.int64)
        good = bool(((integers >= -MAX_INTEGER) & (integers <= MAX_INTEGER)).all())
    else:
        good = True
    if not good:
        what = "a value that is not finite or far too large" if is_float else "a value out of range"
        raise WireError(
            f"Tensor {name!r} holds {what}.", next_step="Training diverged? A lower learning rate may help."
        )
