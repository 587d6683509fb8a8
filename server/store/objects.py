"""Chunks' bytes in an S3-compatible store, for federations that would bloat a database."""

import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from shared.problems import DistransError

if TYPE_CHECKING:
    from obstore.store import S3Store

Result = TypeVar("Result")
_ADDRESS = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w./-]*)?", re.ASCII)
_TIMEOUT_S = 20
_PAGE = 1000  # objects looked at together


class ObjectStoreError(DistransError):
    """The store of objects cannot be reached or does not answer as it should."""

    code = "object-store"


class ObjectMissing(ObjectStoreError):
    """The store answers, but an object that the database refers to is not there; to try again will not help."""

    code = "object-missing"


class Objects:
    """The objects below one prefix of a bucket. Credentials, region and endpoint come from the AWS_… variables."""

    def __init__(self, address: str) -> None:
        if not _ADDRESS.fullmatch(address):
            raise ObjectStoreError(
                "DISTRANS_BLOBS is no address of a bucket.", next_step="Use s3://bucket/prefix, or leave it out."
            )
        self.address = address
        self._store = _open(address)

    def check(self) -> None:
        """Refuse a store that cannot be reached, or that these credentials do not open."""
        self._call(lambda store, api: next(iter(api.list(store, chunk_size=1)), None))

    def put(self, blob_id: str, data: bytes) -> str:
        """Keep some bytes of a blob; the key of the object, which is never written again."""
        key = f"{blob_id}/{uuid.uuid4().hex}"
        self._call(lambda store, api: api.put(store, key, data))
        return key

    def get(self, key: str, begin: int, end: int) -> bytes:
        """The bytes of an object from `begin` up to `end`."""
        from obstore.exceptions import NotFoundError

        try:
            return bytes(self._call(lambda store, api: api.get_range(store, key, start=begin, end=end)))
        except ObjectStoreError as error:
            if isinstance(error.__cause__, NotFoundError | FileNotFoundError):
                raise ObjectMissing(f"The object {key} is missing from {self.address}.") from error
            raise

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are gone already are no error."""
        for begin in range(0, len(keys), _PAGE):
            page = list(keys[begin : begin + _PAGE])
            self._call(lambda store, api: api.delete(store, page))  # noqa: B023 - called at once

    def older_than(self, at: float) -> Iterator[list[str]]:
        """The keys of all objects that were written before a moment, a page at a time."""
        pages = iter(self._call(lambda store, api: api.list(store, chunk_size=_PAGE)))
        while page := self._call(lambda _store, _api: next(pages, None)):
            yield [str(found["path"]) for found in page if found["last_modified"].timestamp() < at]

    def _call(self, step: Callable[["S3Store", Any], Result]) -> Result:
        import obstore
        from obstore.exceptions import BaseError

        try:
            return step(self._store, obstore)
        except (BaseError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ObjectStoreError(
                f"The object store {self.address} failed: {reason[:300]}", next_step="Try again soon."
            ) from error


def _open(address: str) -> "S3Store":
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ObjectStoreError(
            "DISTRANS_BLOBS needs the package obstore.", next_step="pip install 'distrans[s3]'"
        ) from error
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return S3Store.from_url(
        address,
        client_options={"allow_http": endpoint.startswith("http://"), "timeout": timedelta(seconds=_TIMEOUT_S)},
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=_TIMEOUT_S)},
    )
