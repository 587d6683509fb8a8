"""Loads tensors from stored blobs: all of them, or part of an update. Copies each byte once, into its tensor."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from server.store import blobs
from server.store.database import Database
from shared.tensors.names import Tensors
from shared.tensors.spec import dtype_of


@dataclass
class _Run:
    """Adjacent tensors, and where their bytes begin and end in the blob; they are read in one go."""

    begin: int
    end: int
    tensors: list[Tensor]


def load_tensors(db: Database, blob_id: str) -> Tensors:
    """Load all tensors of a blob."""
    return load_part(db, blob_id, "")


def load_part(db: Database, blob_id: str, prefix: str) -> Tensors:
    """Load the tensors whose names start with the prefix, reading only the chunks that hold them.

    The header can be trusted: the blob was checked on arrival. The tensors have torch's own alignment, so methods can
    compute with them as they are.
    """
    first = b"".join(blobs.read(db, blob_id, 0, blobs.CHUNK_BYTES))

    def span(begin: int, end: int) -> Iterable[bytes]:
        return [first[begin:end]] if end <= len(first) else blobs.read(db, blob_id, begin, end)

    start = 8 + int.from_bytes(first[:8], "little")
    header: dict[str, Any] = json.loads(b"".join(span(8, start)))
    header.pop("__metadata__", None)
    wanted = {name: entry for name, entry in header.items() if name.startswith(prefix)}
    part: Tensors = {}
    runs: list[_Run] = []
    for name, entry in sorted(wanted.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (start + offset for offset in entry["data_offsets"])
        part[name] = torch.empty(entry["shape"], dtype=dtype_of(entry["dtype"]))
        if not runs or runs[-1].end != begin:
            runs.append(_Run(begin, begin, []))
        runs[-1].end = end
        runs[-1].tensors.append(part[name])
    for run in runs:
        _fill(run.tensors, span(run.begin, run.end))
    return part


def _fill(tensors: list[Tensor], pieces: Iterable[bytes]) -> None:
    """Copy bytes into the tensors, one after the other."""
    left = iter(pieces)
    rest = memoryview(b"")
    for tensor in tensors:
        target = tensor.reshape(-1).view(torch.uint8).numpy().data
        while target:
            rest = rest or memoryview(next(left, b""))
            if not rest:
                raise ValueError("A stored blob ends before its last tensor.")
            count = min(len(target), len(rest))
            target[:count] = rest[:count]
            target, rest = target[count:], rest[count:]
