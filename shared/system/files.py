"""Files that are complete or absent, never half written; and locks on files and folders."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK_POLL_S = 0.02


def write_durably(file: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically: after a crash at any point it holds the old or the new content, never a mixture."""
    temporary = file.with_name(file.name + ".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as handle:
            os.fchmod(descriptor, mode)  # os.open applies the umask
            _give_to_owner(descriptor, file.parent)
            handle.write(data)
            handle.flush()
            os.fsync(descriptor)
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk, half a file only wastes space
        raise
    sync_folder(file.parent)


def _give_to_owner(descriptor: int, folder: Path) -> None:
    """Give files that root writes into an agent's folder (`sudo distrans-agent pin`) to the agent's user."""
    about = folder.stat()
    if os.geteuid() == 0 and about.st_uid != 0:
        with suppress(OSError):  # root in a container may lack CAP_CHOWN
            os.fchown(descriptor, about.st_uid, about.st_gid)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, busy: Exception, *, wait_s: float = 0.0, mode: int = 0o600) -> Iterator[None]:
    """Hold a lock on a file, which is created if missing, or on a folder; raise `busy` if another process holds it.

    The kernel releases the lock with the process, even after kill -9.
    """
    descriptor = _open_for_lock(path, mode)
    try:
        give_up_at = time.monotonic() + wait_s
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= give_up_at:
                raise busy
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file; False if this user cannot open the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _open_for_lock(path: Path, mode: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, mode)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY)  # a folder, or a file on a disk that has become read-only


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
