"""CPU time, peak memory and disk space of a program and the processes it started, on Linux."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def cpu_seconds(session: int) -> float | None:
    """Return the CPU time of all processes of a session, including ended children; None without /proc."""
    if not (_PROC / str(session)).exists():
        return None
    # utime, stime, cutime and cstime are fields 14 to 17 of /proc/PID/stat; see proc(5).
    ticks = sum(sum(map(int, fields[11:15])) for _, fields in _processes(session))
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_memory_bytes(session: int) -> int | None:
    """Return the largest resident size (VmHWM) so far, added up over the session's processes; None without /proc."""
    if not (_PROC / str(session)).exists():
        return None
    peaks = [re.search(r"VmHWM:\s+(\d+) kB", _read(folder / "status")) for folder, _ in _processes(session)]
    return sum(int(found[1]) * 1024 for found in peaks if found)


def disk_bytes(folder: Path) -> int:
    """Return the space that the files in a folder occupy; sparse and deleted files count as the disk does."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_blocks * 512
            except FileNotFoundError:  # removed in the meantime
                continue
    return total


def _processes(session: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder of each process of a session with the fields of its stat file that follow its name."""
    for folder in _PROC.glob("[0-9]*"):
        # The name is in parentheses and may contain anything.
        fields = _read(folder / "stat").rpartition(")")[2].split()
        if len(fields) > 14 and fields[3] == str(session):
            yield folder, fields


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""
