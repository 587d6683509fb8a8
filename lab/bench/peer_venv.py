"""Virtual environments for the peers that a bench compares with, kept for the next run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from shared.contract.errors import DistransError

_STAMP = "installed.txt"  # what a complete environment holds; without it, the installation was interrupted


def default_peers_folder() -> Path:
    """Return the folder for peers' environments in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "distrans" / "peers"


def peer_programs(folder: Path, name: str, requirement: str) -> Path:
    """Return the folder with the programs of an environment that has a package; create it the first time."""
    place = folder.expanduser().resolve() / name
    stamp = place / _STAMP
    if not stamp.exists() or stamp.read_text() != requirement:
        try:
            _run([sys.executable, "-m", "venv", "--clear", str(place)], requirement)
            _run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement], requirement)
            stamp.write_text(requirement)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    return place / "bin"


def _run(command: list[str], requirement: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - no shell
    except (OSError, subprocess.CalledProcessError) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise DistransError(
            f"Cannot install {requirement}: {lines[-1] if lines else error}",
            next_step="Check that pip can reach its index, or choose another folder with --peers.",
        ) from error
