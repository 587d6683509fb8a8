"""Blob bytes in a folder: one file per blob, or several if its upload was resumed.

A request that appends to a blob writes a file of its own, so that two requests for the same upload never touch each
other's bytes, on one replica or on two. A row says how much of the file counts; whatever a crash left beyond that, or
in a file without a row, does not.
"""

import errno
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from server.store.objects.store import (
    OWNER_KEY,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreFull,
    Piece,
)
from shared.system.files import sync_folder

FOLDER = "blobs"  # inside the folder of the address, and private whatever that folder's mode
_KEY = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PAGE = 1000  # keys
_FLUSH_BYTES = 16 * 1024 * 1024  # how much, and
_FLUSH_S = 2.0  # how long, an upload grows before it is synced and recorded
logger = logging.getLogger(__name__)


class Spool:
    """The files in one folder. Replicas may share it if it is the same file system for all of them."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.home = Path(unquote(parts.path))
        if parts.netloc or parts.query or parts.fragment or not self.home.is_absolute() or self.home == Path("/"):
            raise ObjectStoreError("DISTRANS_BLOBS is not a folder URL.", next_step="Use file:///path/to/folder.")
        self.address = address
        self.is_claimed = False
        self.folder = self.home / FOLDER

    def check(self) -> None:
        """Raise unless files can be created in the folder."""
        self._prepare()
        probe = self.folder / f".probe-{uuid.uuid4().hex}"
        with self._readable_errors():
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            probe.unlink()

    def claim(self, owner: str) -> str:
        """Make `owner` the owner of the folder unless it has one; return the owner."""
        self._prepare()
        mark, draft = self.folder / OWNER_KEY, self.folder / f"{OWNER_KEY}-{uuid.uuid4().hex}"
        with self._readable_errors():
            if not mark.exists():
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as handle:
                    handle.write(owner)
                    handle.flush()
                    os.fsync(descriptor)
                with suppress(FileExistsError):  # another replica was first
                    os.link(draft, mark)  # appears with its content or not at all
                draft.unlink()
                sync_folder(self.folder)
            return mark.read_text(errors="replace")

    def free_bytes(self) -> int:
        """Return how much room is left."""
        with self._readable_errors():
            return shutil.disk_usage(self.home).free

    def writer(self, blob_id: str) -> "SpoolWriter":
        """Return a writer of a new file for a blob."""
        return SpoolWriter(self, f"{blob_id}.{uuid.uuid4().hex}")

    def holds(self, key: str) -> bool:
        """Return whether a key is the name of a file in this folder."""
        return bool(_KEY.fullmatch(key))

    def path(self, key: str) -> Path:
        """Return the path of a file; raise unless the key, which comes from the database, has the right form."""
        if not self.holds(key):
            raise ObjectStoreError(f"{key!r} is not the name of a file in {self.address}.")
        return self.folder / key

    def append(self, key: str, begin: int, data: bytes | memoryview) -> None:
        """Write the bytes of a file from `begin` on; create the file if that is 0."""
        create = os.O_CREAT | os.O_EXCL if begin == 0 else 0
        with self._readable_errors():
            descriptor = os.open(self.path(key), os.O_WRONLY | os.O_NOFOLLOW | create, 0o600)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.pwrite(descriptor, view, begin + len(data) - len(view)) :]
            finally:
                os.close(descriptor)

    def sync(self, key: str, *, name: bool) -> None:
        """Make a file's bytes durable, and its name if that is new."""
        with self._readable_errors():
            descriptor = os.open(self.path(key), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if name:
                sync_folder(self.folder)

    def get(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes of a file from `begin` to `end`."""
        parts, position = [], begin
        with self._readable_errors(missing=key):
            descriptor = os.open(self.path(key), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                while position < end and (part := os.pread(descriptor, end - position, position)):
                    parts.append(part)
                    position += len(part)
            finally:
                os.close(descriptor)
        if position < end:
            raise ObjectMissing(self.address, key)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files, ignoring those already gone. What a power cut brings back is collected again."""
        with self._readable_errors():
            for key in filter(self.holds, keys):
                self.path(key).unlink(missing_ok=True)

    def list_keys(self) -> Iterator[list[str]]:
        """Yield the keys of all files, page by page."""
        self._prepare()
        with self._readable_errors(), os.scandir(self.folder) as entries:
            names = (entry.name for entry in entries if self.holds(entry.name))
            while page := list(islice(names, _PAGE)):
                yield page

    def _prepare(self) -> None:
        """Create the private folder. The one it is in must exist: it may be where a disk is not mounted yet."""
        with self._readable_errors():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            mode = stat.S_IMODE(self.folder.stat().st_mode)
            if mode & 0o077:
                self.folder.chmod(0o700)
                logger.warning("%s was accessible to other users (mode %o); changed to 700", self.folder, mode)

    @contextmanager
    def _readable_errors(self, missing: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise ObjectStoreFull(
                    f"The disk of {self.home} is full.", next_step="Free some space on it, or raise its quota."
                ) from error
            if not self.home.is_dir():
                raise ObjectStoreError(
                    f"There is no folder {self.home}, which DISTRANS_BLOBS names.",
                    next_step="Create it, or mount the disk that it is on.",
                ) from error
            if missing is not None and isinstance(error, FileNotFoundError) and self.folder.is_dir():
                raise ObjectMissing(self.address, missing) from error
            raise ObjectStoreError(
                f"The folder {self.home} that DISTRANS_BLOBS names cannot be used: {error.strerror}.",
                next_step="Make it readable and writable for the user that runs the coordinator.",
            ) from error


class SpoolWriter:
    """Writes one file. It is opened for each write: uploads may be slow and many, and descriptors few."""

    def __init__(self, spool: Spool, key: str) -> None:
        self._spool, self._key = spool, key
        self._is_begun, self._size, self._flushed = False, 0, 0
        self._flush_at = time.monotonic() + _FLUSH_S

    @property
    def is_due(self) -> bool:
        """Whether enough was written, or long enough ago."""
        waiting = self._size - self._flushed
        return waiting >= _FLUSH_BYTES or (waiting > 0 and time.monotonic() >= self._flush_at)

    def write(self, data: bytes | memoryview) -> None:
        """Append to the file."""
        self._is_begun = True
        self._spool.append(self._key, self._size, data)
        self._size += len(data)

    def flush(self) -> list[Piece]:
        """Sync the file and return what was added."""
        added = self._size - self._flushed
        if not added:
            return []
        is_new = self._flushed == 0
        self._spool.sync(self._key, name=is_new)
        self._flushed, self._flush_at = self._size, time.monotonic() + _FLUSH_S
        return [Piece(added, object_key=self._key, extends=not is_new)]

    @property
    def keys(self) -> list[str]:
        """The file, if there may be one."""
        return [self._key] if self._is_begun else []
