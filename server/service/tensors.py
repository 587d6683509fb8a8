"""Tensors in the database: all of a blob, or the part of an update that is wanted."""

import json

import safetensors.torch

from server.store import blobs
from server.store.session import Database
from shared.methods.base import Tensors


def load_tensors(db: Database, blob_id: str) -> Tensors:
    """All tensors of a blob."""
    return safetensors.torch.load(blobs.read_all(db, blob_id))


def load_part(db: Database, blob_id: str, prefix: str) -> Tensors:
    """The tensors whose names start with the prefix; chunks that hold none of them are not read.

    The blob was checked when it came, so its header can be believed.
    """
    length = int.from_bytes(b"".join(blobs.read(db, blob_id, 0, 8)), "little")
    header = json.loads(b"".join(blobs.read(db, blob_id, 8, 8 + length)))
    wanted = {name: entry for name, entry in header.items() if name.startswith(prefix)}
    part, position = {}, 0
    runs: list[list[int]] = []  # tensors that stand side by side are read in one go
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
    start = 8 + length
    data = [piece for begin, end in runs for piece in blobs.read(db, blob_id, start + begin, start + end)]
    return safetensors.torch.load(b"".join([len(text).to_bytes(8, "little"), text, *data]))
