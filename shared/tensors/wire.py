"""Tensors on the wire: safetensors in one canonical form, and digests.

    8 bytes: header length │ header: JSON {name: {dtype, shape, data_offsets}, "__metadata__": {…}} │ data, no gaps

torch is imported only to encode and decode, not for digests.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.tensors.checker import Checker
from shared.tensors.names import Tensors
from shared.tensors.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor


def encode(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode tensors as safetensors; the same tensors and metadata always give the same bytes."""
    import safetensors.torch

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    data = safetensors.torch.save(plain)
    # The library writes metadata in random order, but digests need one canonical form, so the header is rebuilt here.
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    entries = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
    full = {"__metadata__": dict(sorted(metadata.items())), **entries} if metadata else entries
    text = json.dumps(full, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def decode(data: bytes, spec: Spec) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and metadata of a body that matches the spec. Raise a WireError for any other."""
    import safetensors.torch

    checker = Checker(spec)
    checker.feed(data)
    metadata = checker.finish()
    return safetensors.torch.load(data), metadata


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
