"""Checks a safetensors body against a spec as it arrives.

A body is rejected at the first invalid byte, before anything of an untrusted size is allocated. numpy is imported only
where values are checked.
"""

import json
from typing import Any

from shared.contract.errors import WireError
from shared.contract.limits import MAX_ABSOLUTE, MAX_INTEGER, MAX_WEIGHT
from shared.tensors.spec import WIRE_DTYPES, Entry, Spec


class Checker:
    """A streaming check: takes a body in pieces of any size and buffers only the header and a few bytes.

    With several specs, the body must match one of them.
    """

    def __init__(self, spec: Spec, *others: Spec) -> None:
        self._spec, self._others = spec, others
        self._max_header_bytes = max(candidate.max_header_bytes for candidate in (spec, *others))
        self._head = bytearray()
        self._header_end: int | None = None
        self._regions: list[tuple[int, str, Entry]] = []  # (end within the data, name, entry), in order
        self._region = 0
        self._position = 0  # within the data
        self._carry = b""  # the first bytes of an element that has not fully arrived
        self.metadata: dict[str, str] = {}

    def feed(self, piece: bytes | memoryview) -> None:
        """Check the next piece. Raise a WireError at the first invalid byte."""
        view = memoryview(piece)
        if self._header_end is None:
            view = self._feed_header(view)
        if self._header_end is not None and len(view):
            self._feed_data(view)

    def finish(self) -> dict[str, str]:
        """Check that the body is complete and return its metadata."""
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
            header = json.loads(text.decode(), object_pairs_hook=_reject_repeats, parse_int=_parse_int)
        except (ValueError, RecursionError) as error:
            raise WireError(
                "The header is not valid JSON with unique keys.", next_step="Send a safetensors body."
            ) from error
        if not isinstance(header, dict) or text[:1] != b"{":
            raise WireError("The header is not a JSON object.", next_step="Send a safetensors body.")
        self.metadata = _checked_metadata(header.pop("__metadata__", {}), self._spec.max_metadata_bytes)
        self._spec = next((other for other in self._others if _fits(header, other)), self._spec)
        _check_names(header.keys(), self._spec.entries.keys())
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
            if self._position == end:  # finished, or an empty tensor
                self._region += 1
                continue
            taken = view[: end - self._position]
            self._position += len(taken)
            view = view[len(taken) :]
            data = self._carry + bytes(taken) if self._carry else taken
            whole = len(data) - len(data) % entry.item_bytes
            _check_values(name, data[:whole], entry.wire_name)
            self._carry = bytes(data[whole:])


def claimed_spec(data: bytes) -> Spec:
    """Return what the header of a body says about its tensors. Raise a WireError if it says nothing sensible.

    The rest of the body is not looked at: check it against a spec that is known to be good.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:end], object_pairs_hook=_reject_repeats, parse_int=_parse_int)
        header.pop("__metadata__", None)
        entries = {name: Entry(tuple(found["shape"]), found["dtype"]) for name, found in header.items()}
        are_possible = all(
            _are_sizes(list(entry.shape)) and entry.wire_name in WIRE_DTYPES for entry in entries.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError("The header is not that of a safetensors body.") from error
    if not are_possible:
        raise WireError("The header has a shape or dtype that no tensor here can have.")
    return Spec(entries)


def _reject_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("repeated key")
    return unique


def _parse_int(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)  # as safetensors reads it; int would turn it into a valid size


def _checked_metadata(found: Any, max_bytes: int) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise WireError("The metadata is not a table of strings.")
    try:
        size_bytes = sum(len(text.encode()) for item in found.items() for text in item)
    except UnicodeEncodeError as error:  # a lone surrogate
        raise WireError("The metadata is not valid Unicode.") from error
    if size_bytes > max_bytes:
        raise WireError(f"The metadata has more than {max_bytes} bytes.")
    return found


def _fits(header: dict[str, Any], spec: Spec) -> bool:
    """Return whether names and shapes match the spec; everything else is checked later."""
    return header.keys() == spec.entries.keys() and all(
        isinstance(header[name], dict) and header[name].get("shape") == list(entry.shape)
        for name, entry in spec.entries.items()
    )


def _check_names(found: Any, expected: Any) -> None:
    differences = {"missing": sorted(expected - found), "unexpected": sorted(found - expected)}
    parts = [f"{kind}: {_some(names)}" for kind, names in differences.items() if names]
    if parts:
        raise WireError(
            f"The body does not hold the expected tensors; {'; '.join(parts)}.",
            next_step="Check that it was created for this plan and by a compatible version.",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


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
    # In Python, JSON's true and 1.0 equal 1, but they are not sizes.
    return isinstance(found, list) and all(type(value) is int and value >= 0 for value in found)


def _check_values(name: str, data: bytes | memoryview, dtype: str) -> None:
    import numpy as np

    is_float = dtype in ("F64", "F32", "F16", "BF16")
    if dtype == "BF16":  # numpy has no bfloat16; an exponent of all ones means infinity or NaN
        good = bool(((np.frombuffer(data, np.uint16) & 0x7F80) != 0x7F80).all())
    elif dtype == "F64":
        good = bool((np.abs(np.frombuffer(data, np.float64)) < MAX_ABSOLUTE / MAX_WEIGHT).all())  # also false for NaN
    elif is_float:
        numbers = np.frombuffer(data, np.float32 if dtype == "F32" else np.float16)
        good = bool(np.isfinite(numbers).all())  # finite ones are far below the limit
    elif dtype == "BOOL":
        good = bool((np.frombuffer(data, np.uint8) <= 1).all())
    elif dtype == "I64":
        integers = np.frombuffer(data, np.int64)
        good = bool(((integers >= -MAX_INTEGER) & (integers <= MAX_INTEGER)).all())
    else:
        good = True
    if not good:
        what = "a value that is not finite or far too large" if is_float else "a value out of range"
        raise WireError(f"Tensor {name!r} contains {what}.", next_step="If training diverged, lower the learning rate.")
