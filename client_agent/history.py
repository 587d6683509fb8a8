"""What the gate decided about each model, one line of JSON per decision, in the order of the decisions."""

import os
import stat
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.evaluation import Evaluation
from shared.files import sync_folder, write_durably

MAX_BYTES = 4 * 1024 * 1024
_KEPT_LINES = 1000  # with reasons of the greatest length they have less than MAX_BYTES


class HistoryLine(BaseModel):
    """What one global model scored on this site's held-out images, and whether it may be served."""

    model_config = ConfigDict(frozen=True)
    model: int
    digest: str = ""  # of the model's bytes; older agents wrote lines without one
    fingerprint: str = ""  # of the bundle that was measured, see kept_models.py; none if it could not be fetched
    with_offset: Evaluation | None
    without_offset: Evaluation | None
    local: Evaluation | None = None
    served: bool = True
    held_by_pin: bool = False
    undecided: bool = False  # it could not be measured; it is considered again when that is possible
    reason: str = ""

    @property
    def approved(self) -> bool:
        """It passed the gate; a pin may still hold it back."""
        return self.served or self.held_by_pin

    def row(self) -> dict[str, Any]:
        """Accuracies and whether it was served, for people."""

        def accuracy(result: Evaluation | None) -> float | None:
            return None if result is None else result.accuracy

        return {
            "model": self.model,
            "with_offset": accuracy(self.with_offset),
            "without_offset": accuracy(self.without_offset),
            "local": accuracy(self.local),
            "served": self.served,
            "reason": self.reason,
        }


def append_line(file: Path, line: HistoryLine) -> None:
    """Add a line durably, readable by its owner alone. A line that a crash cut off stays a line of its own."""
    is_new = not file.exists()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and stat.S_IMODE(about.st_mode) != 0o600:  # as older versions left it
            os.fchmod(descriptor, 0o600)
        is_torn = about.st_size > 0 and os.pread(descriptor, 1, about.st_size - 1) != b"\n"
        rest = memoryview(b"\n" * is_torn + line.model_dump_json().encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, about.st_size)
            raise
    finally:
        os.close(descriptor)
    if is_new:
        sync_folder(file.parent)


def read_lines(file: Path) -> list[HistoryLine]:
    """The last line about each model, oldest first; lines that a crash cut off are skipped."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    # By number, then by digest and fingerprint; with its place in the file.
    found: defaultdict[int, dict[tuple[str, str], tuple[int, HistoryLine]]] = defaultdict(dict)
    for place, part in enumerate(text.split("\n")):
        try:
            line = HistoryLine.model_validate_json(part)
        except ValidationError:
            continue
        same_number = found[line.model]
        if line.digest:
            same_number.pop((line.digest, ""), None)  # it could not be fetched then
        else:  # of an older agent, for which a number was a model
            same_number.clear()
        same_number[line.digest, line.fingerprint] = place, line
    placed = [entry for same_number in found.values() for entry in same_number.values()]
    return [line for _, line in sorted(placed, key=lambda entry: entry[0])]


def compact(file: Path, is_kept: Callable[[HistoryLine], bool]) -> None:
    """Shorten a file over MAX_BYTES to its newest lines and those that `is_kept` names.

    A coordinator that announces a new broken model every few seconds must not fill the disk, nor delay a restart.
    """
    if not file.exists() or file.stat().st_size <= MAX_BYTES:
        return
    lines = read_lines(file)
    staying = [line for line in lines[:-_KEPT_LINES] if is_kept(line)] + lines[-_KEPT_LINES:]
    write_durably(file, b"".join(line.model_dump_json().encode() + b"\n" for line in staying))
