"""Blob bytes in an S3-compatible store, for federations that would bloat a database."""

import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from server.store.objects.store import OWNER_KEY, ObjectMissing, ObjectStoreError, ObjectStoreFull, Piece

if TYPE_CHECKING:
    from obstore.store import S3Store

Result = TypeVar("Result")
_ADDRESS = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w./-]*)?", re.ASCII)
_TIMEOUT_S = 20
_PAGE = 1000  # objects per request
_FULL = re.compile(r"XMinioStorageFull|QuotaExceeded|507 Insufficient Storage")  # MinIO, Ceph, others


class Bucket:
    """The objects under one prefix of a bucket. Credentials, region and endpoint come from the AWS_… variables."""

    def __init__(self, address: str) -> None:
        if not _ADDRESS.fullmatch(address):
            raise ObjectStoreError(
                "DISTRANS_BLOBS is not a bucket URL.", next_step="Use s3://bucket/prefix, or unset it."
            )
        self.address = address
        self.is_claimed = False  # owned by this coordinator; see server.store.ownership
        self._store = _open(address)

    def check(self) -> None:
        """Raise unless the store is reachable with these credentials."""
        self._call(lambda store, api: next(iter(api.list(store, chunk_size=1)), None))

    def free_bytes(self) -> None:
        """Return None: a bucket does not tell how much room is left."""
        return

    def writer(self, blob_id: str) -> "BucketWriter":
        """Return a writer of new objects for a blob."""
        return BucketWriter(self, blob_id)

    def holds(self, key: str) -> bool:
        """Return whether a key has the form that `put` returns."""
        return "/" in key

    def put(self, blob_id: str, data: bytes | memoryview) -> str:
        """Store some bytes of a blob in a new object, which never changes; return its key."""
        key = f"{blob_id}/{uuid.uuid4().hex}"
        self._call(lambda store, api: api.put(store, key, bytes(data)))
        return key

    def get(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes of an object from `begin` to `end`."""
        try:
            return bytes(self._call(lambda store, api: api.get_range(store, key, start=begin, end=end)))
        except ObjectStoreError as error:
            if _is_missing(error):
                raise ObjectMissing(self.address, key) from error
            raise

    def claim(self, owner: str) -> str:
        """Make `owner` the owner of the prefix unless it has one; return the owner."""
        import obstore

        try:
            self._call(lambda store, api: api.put(store, OWNER_KEY, owner.encode(), mode="create"))
        except ObjectStoreError as error:
            if not isinstance(error.__cause__, obstore.exceptions.AlreadyExistsError):
                raise
        return bytes(self._call(lambda store, api: api.get(store, OWNER_KEY).bytes())).decode(errors="replace")

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, ignoring those already gone."""
        for begin in range(0, len(keys), _PAGE):
            page = list(keys[begin : begin + _PAGE])
            self._call(lambda store, api: api.delete(store, page))  # noqa: B023 - called at once

    def list_keys(self) -> Iterator[list[str]]:
        """Yield the keys of all blob objects, page by page."""
        pages = iter(self._call(lambda store, api: api.list(store, chunk_size=_PAGE)))
        while page := self._call(lambda _store, _api: next(pages, None)):
            yield [str(found["path"]) for found in page if found["path"] != OWNER_KEY]

    def _call(self, step: Callable[["S3Store", Any], Result]) -> Result:
        import obstore
        from obstore.exceptions import BaseError

        try:
            return step(self._store, obstore)
        except (BaseError, OSError) as error:
            text = str(error).strip()
            if _FULL.search(text):
                raise ObjectStoreFull(
                    f"The object store {self.address} is full.", next_step="Free some space in it, or raise its quota."
                ) from error
            raise ObjectStoreError(
                f"The object store {self.address} failed: {text.splitlines()[0][:300]}", next_step="Try again later."
            ) from error


class BucketWriter:
    """Writes an object per chunk."""

    def __init__(self, bucket: Bucket, blob_id: str) -> None:
        self._bucket, self._blob_id = bucket, blob_id
        self._pieces: list[Piece] = []
        self.keys: list[str] = []

    @property
    def is_due(self) -> bool:
        """Whether there is anything to record."""
        return bool(self._pieces)

    def write(self, data: bytes | memoryview) -> None:
        """Store a new object."""
        key = self._bucket.put(self._blob_id, data)
        self.keys.append(key)
        self._pieces.append(Piece(len(data), object_key=key))

    def flush(self) -> list[Piece]:
        """Return the objects stored since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces


def _is_missing(error: ObjectStoreError) -> bool:
    """Return whether the object is missing; a missing bucket may come back."""
    cause = error.__cause__
    return isinstance(cause, FileNotFoundError) and "NoSuchBucket" not in str(cause)


def _open(address: str) -> "S3Store":
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ObjectStoreError(
            "DISTRANS_BLOBS needs the package obstore.", next_step="Run: pip install 'distrans[s3]'"
        ) from error
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return S3Store.from_url(
        address,
        client_options={"allow_http": endpoint.startswith("http://"), "timeout": timedelta(seconds=_TIMEOUT_S)},
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=_TIMEOUT_S)},
    )
