"""What a place outside the database offers to keep the bytes of blobs: a bucket, or a folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.contract.errors import DistransError

OWNER_KEY = ".distrans-owner"  # names the coordinator that owns a prefix or folder


class ObjectStoreError(DistransError):
    """The object store cannot be used, or failed."""

    code = "object-store"


class ObjectMissing(ObjectStoreError):
    """An object the database refers to does not exist; retrying does not help."""

    code = "object-missing"

    def __init__(self, address: str, key: str) -> None:
        super().__init__(
            f"The object {key} is missing from {address}.",
            next_step="Restore it from the bucket's versions or from a backup.",
        )
        self.key = key


class ObjectStoreFull(ObjectStoreError):
    """The store is full, or this coordinator's quota is used up."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a blob to record in a chunk: in memory, in a new object, or at the end of the last chunk's object."""

    size_bytes: int
    data: bytes | memoryview = b""
    object_key: str | None = None
    extends: bool = False


class ObjectWriter(Protocol):
    """Writes what one request, or one thread, appends to a blob."""

    @property
    def is_due(self) -> bool:
        """Whether what was written should be recorded now."""

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes; at most one chunk."""

    def flush(self) -> list[Piece]:
        """Return what was written since the last call; it is durable and can be recorded."""

    @property
    def keys(self) -> list[str]:
        """The objects written so far."""


class ObjectStore(Protocol):
    """Objects of one coordinator. An object is written once, from front to back, and never changes."""

    address: str
    is_claimed: bool  # owned by this coordinator; see server.store.ownership

    def check(self) -> None:
        """Raise unless the store can be used."""

    def claim(self, owner: str) -> str:
        """Make `owner` the owner of the store unless it has one; return the owner."""

    def free_bytes(self) -> int | None:
        """Return how much room is left; None if unknown."""

    def writer(self, blob_id: str) -> ObjectWriter:
        """Return a writer of new objects for a blob."""

    def holds(self, key: str) -> bool:
        """Return whether a key has the form of this kind of store."""

    def get(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes of an object from `begin` to `end`."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, ignoring those already gone."""

    def list_keys(self) -> Iterator[list[str]]:
        """Yield the keys of all objects, page by page."""
