"""The one folder that a demo lives in."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.problems import DistransError

_MARKER = ".distrans-demo"


@contextmanager
def claim(folder: Path) -> Iterator[Path]:
    """The folder, emptied and held by this process alone; one that no demo has made is left as it is."""
    folder = folder.expanduser().resolve()
    marker = folder / _MARKER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not marker.exists():
            raise DistransError(f"{folder} is not empty and not a demo's.", next_step="Name another folder with --dir.")
        descriptor = os.open(marker, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DistransError(
            f"{folder} cannot be used: {error.strerror}.", next_step="Name another folder with --dir."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
        yield folder
    except BlockingIOError as error:
        raise DistransError(
            f"Another demo is running in {folder}.", next_step="Stop it, or name another folder with --dir."
        ) from error
    finally:
        os.close(descriptor)
