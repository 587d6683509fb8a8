"""Blob bytes in an S3-compatible store, for federations that would bloat a database."""

import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shared.contract.errors import DistransError

if TYPE_CHECKING:
    from obstore.store import S3Store

Result = TypeVar("Result")
_ADDRESS = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w./-]*)?", re.ASCII)
_TIMEOUT_S = 20
_PAGE = 1000  # objects per request
OWNER_KEY = ".distrans-owner"  # names the coordinator that owns a prefix
_FULL = re.compile(r"XMinioStorageFull|QuotaExceeded|507 Insufficient Storage")  # MinIO, Ceph, others


class ObjectStoreError(DistransError):
    """The object store is unreachable or failed."""

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


class ObjectStore:
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

    def put(self, blob_id: str, data: bytes) -> str:
        """Store some bytes of a blob in a new object, which never changes; return its key."""
        key = f"{blob_id}/{uuid.uuid4().hex}"
        self._call(lambda store, api: api.put(store, key, data))
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
