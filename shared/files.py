"""Files that are whole or not there: written aside, flushed to the disk, then renamed."""

import os
from contextlib import suppress
from pathlib import Path


def write_durably(file: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file in one step; after a crash at any point the old or the new content is there, never a mixture."""
    aside = file.with_name(file.name + ".new")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as handle:
            os.fchmod(descriptor, mode)  # whatever the umask
            _give_to_owner(descriptor, file.parent)
            handle.write(data)
            handle.flush()
            os.fsync(descriptor)
        aside.replace(file)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)  # half a file on a full disk helps nobody
        raise
    sync_folder(file.parent)


def _give_to_owner(descriptor: int, folder: Path) -> None:
    """What root writes into an agent's folder, as with `sudo distrans-agent pin`, is for the agent's user."""
    about = folder.stat()
    if os.geteuid() == 0 and about.st_uid != 0:
        with suppress(OSError):  # root in a container may lack the right
            os.fchown(descriptor, about.st_uid, about.st_gid)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
