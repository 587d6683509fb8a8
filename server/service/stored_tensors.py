"""Loads tensors from stored blobs: all of them, or part of an update."""

import json

import safetensors.torch

from server.store import blobs
from server.store.database import Database
from shared.tensors.names import Tensors


def load_tensors(db: Database, blob_id: str) -> Tensors:
    """Load all tensors of a blob."""
    return safetensors.torch.load(blobs.read_all(db, blob_id))


def load_part(db: Database, blob_id: str, prefix: str) -> Tensors:
    """Load the tensors whose names start with the prefix, reading only the chunks that hold them.

    The header can be trusted: the blob was checked on arrival.
    """
    first = b"".join(blobs.read(db, blob_id, 0, blobs.CHUNK_BYTES))

    def span(begin: int, end: int) -> bytes:
        return first[begin:end] if end <= len(first) else b"".join(blobs.read(db, blob_id, begin, end))

    start = 8 + int.from_bytes(first[:8], "little")
    header = json.loads(span(8, start))
    wanted = {name: entry for name, entry in header.items() if name.startswith(prefix)}
    part, position = {}, 0
    runs: list[list[int]] = []  # adjacent tensors are read in one go
    for name, entry in sorted(wanted.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        part[name] = {**entry, "data_offsets": [position, position + end - begin]}
        position += end - begin
        if runs and runs[-1][1] == begin:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
    text = json.dumps(part).encode()
    text += b" " * (-len(text) % 8)
    data = (span(start + begin, start + end) for begin, end in runs)
    return safetensors.torch.load(b"".join([len(text).to_bytes(8, "little"), text, *data]))
