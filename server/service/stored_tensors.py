"""Reads tensors from stored blobs: all of them, or part of an update. Copies each byte once, into its array."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy.orm import Session
from typing_extensions import override

from server.store import blobs
from server.store.database import Database
from shared.tensors.arrays import Array, Arrays, empty, memory_of
from shared.tensors.names import PERSONAL, SHARED, add_prefix, strip_prefix
from shared.tensors.spec import Spec
from shared.tensors.wire import Layout

_HEAD_BYTES = 64 * 1024  # enough for the header of most models


@dataclass
class _Run:
    """Adjacent tensors, and where their bytes begin and end in the blob; they are read in one go."""

    begin: int
    end: int
    arrays: list[Array]


def load_tensors(db: Database, blob_id: str) -> Arrays:
    """Load all tensors of a blob."""
    return load_part(db, blob_id, "")


def load_shared(db: Database, blob_id: str, into: Arrays | None = None) -> Arrays:
    """Load the tensors of an update that are averaged, as the mean takes them; see `load_part` for `into`."""
    return strip_prefix(load_part(db, blob_id, SHARED, add_prefix(into or {}, SHARED)), SHARED)


def load_personal(db: Database, blob_id: str) -> Arrays:
    """Load the tensors of an update that only concern its client."""
    return strip_prefix(load_part(db, blob_id, PERSONAL), PERSONAL)


def load_part(db: Database, blob_id: str, prefix: str, into: Arrays | None = None) -> Arrays:
    """Load the tensors whose names start with the prefix, reading only the chunks that hold them.

    The header can be trusted: the blob was checked on arrival. The arrays have torch's own alignment, so methods can
    compute with them as they are. Arrays of the same names, shapes and dtypes in `into` are filled and returned: the
    system takes about as long to provide new memory as to read the bytes.
    """
    first = b"".join(blobs.read(db, blob_id, 0, blobs.CHUNK_BYTES))

    def span(begin: int, end: int) -> Iterable[bytes]:
        return [first[begin:end]] if end <= len(first) else blobs.read(db, blob_id, begin, end)

    end = Layout.header_bytes(first)
    layout = Layout.read(first if end <= len(first) else b"".join(span(0, end)))
    part: Arrays = {}
    runs: list[_Run] = []
    for name, entry in layout.spec.entries.items():
        if not name.startswith(prefix):
            continue
        begin = layout.starts[name]
        old = (into or {}).get(name)
        is_usable = old is not None and (old.shape, old.dtype) == (entry.shape, entry.dtype)
        part[name] = old if old is not None and is_usable else empty(entry.shape, entry.dtype)
        if not runs or runs[-1].end != begin:
            runs.append(_Run(begin, begin, []))
        runs[-1].end = begin + entry.size_bytes
        runs[-1].arrays.append(part[name])
    for run in runs:
        _fill(run.arrays, span(run.begin, run.end))
    return part


def _fill(arrays: list[Array], pieces: Iterable[bytes]) -> None:
    """Copy bytes into the arrays, one after the other."""
    left = iter(pieces)
    rest = memoryview(b"")
    for array in arrays:
        target = memory_of(array)
        while target:
            rest = rest or memoryview(next(left, b""))
            if not rest:
                raise ValueError("A stored blob ends before its last tensor.")
            count = min(len(target), len(rest))
            target[:count] = rest[:count]
            target, rest = target[count:], rest[count:]


def stored_spec(session: Session, blob_id: str) -> Spec:
    """Return the spec of a stored blob, which its header tells."""
    head = blobs.read_head(session, blob_id, _HEAD_BYTES)
    end = Layout.header_bytes(head)
    return Layout.read(head if end <= len(head) else blobs.read_head(session, blob_id, end)).spec


class StoredTensors(Mapping[str, Array]):
    """The tensors of a blob, each read when it is asked for: a round needs few or none of the model before it."""

    def __init__(self, db: Database, blob_id: str) -> None:
        self._db, self._blob_id = db, blob_id

    @override
    def __getitem__(self, name: str) -> Array:
        entry = self._layout.spec.entries[name]
        begin, array = self._layout.starts[name], empty(entry.shape, entry.dtype)
        _fill([array], blobs.read(self._db, self._blob_id, begin, begin + entry.size_bytes))
        return array

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.spec.entries)

    @override
    def __len__(self) -> int:
        return len(self._layout.spec.entries)

    @cached_property
    def _layout(self) -> Layout:
        head = b"".join(blobs.read(self._db, self._blob_id, 0, _HEAD_BYTES))
        end = Layout.header_bytes(head)
        return Layout.read(head if end <= len(head) else b"".join(blobs.read(self._db, self._blob_id, 0, end)))
