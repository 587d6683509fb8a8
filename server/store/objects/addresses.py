"""Opens the object store at the address in DISTRANS_BLOBS."""

from server.store.objects.bucket import Bucket
from server.store.objects.spool import Spool
from server.store.objects.store import ObjectStore, ObjectStoreError


def open_store(address: str) -> ObjectStore:
    """Return the store at an address, without using it yet; raise if the address is invalid."""
    if address.startswith("s3:"):
        return Bucket(address)
    if address.startswith("file:"):
        return Spool(address)
    raise ObjectStoreError(
        "DISTRANS_BLOBS is neither a folder nor a bucket.",
        next_step="Use file:///path/to/folder or s3://bucket/prefix, or unset it.",
    )
