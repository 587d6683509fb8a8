"""The folder that a demo runs in."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.contract.errors import DistransError
from shared.system.files import locked

_MARKER = ".distrans-demo"


@contextmanager
def claim(folder: Path) -> Iterator[Path]:
    """Lock and empty the folder of an earlier demo, or create it; refuse any other folder with files in it."""
    folder = folder.expanduser().resolve()
    marker = folder / _MARKER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not marker.exists():
            raise DistransError(
                f"{folder} is not empty and not from a demo.", next_step="Choose another folder with --dir."
            )
        marker.touch()
    except OSError as error:
        raise DistransError(
            f"Cannot use {folder}: {error.strerror}.", next_step="Choose another folder with --dir."
        ) from error
    busy = DistransError(
        f"Another demo is running in {folder}.", next_step="Stop it, or choose another folder with --dir."
    )
    with locked(marker, busy):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
        yield folder
