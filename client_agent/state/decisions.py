"""The gate's decisions: one JSON line per decision, oldest first."""

import os
import stat
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.contract.measurements import Evaluation
from shared.system.files import sync_folder, write_durably

MAX_BYTES = 4 * 1024 * 1024
_KEPT_LINES = 1000  # smaller than MAX_BYTES even with reasons of maximum length


class GateDecision(BaseModel):
    """The gate's decision about one model, with its scores on held-out images if it was measured."""

    model_config = ConfigDict(frozen=True)
    model: int
    digest: str = ""  # of the model's bytes; missing from lines of older agents
    fingerprint: str = ""  # of the measured bundle; empty if the model could not be downloaded
    with_offset: Evaluation | None
    without_offset: Evaluation | None
    local: Evaluation | None = None
    candidate: str = ""  # the name of what the gate chose; missing from lines of older agents
    record: str = ""  # the digest of its record next to the model; see records.py
    score: Evaluation | None = None  # of the candidate, on the images that choose
    tested: Evaluation | None = None  # of the candidate, on the images that test
    considered: dict[str, str] = {}  # digests of the site's own models that it could choose from
    served: bool = True
    held_by_pin: bool = False
    undecided: bool = False  # it could not be measured and will be considered again
    reason: str = ""

    @property
    def approved(self) -> bool:
        """Whether it passed the gate; a pin may still hold it back."""
        return self.served or self.held_by_pin

    @property
    def compared(self) -> Evaluation | None:
        """The score to compare with other models': the candidate's, or the model's in lines of older agents."""
        return self.with_offset if self.score is None else self.score

    def row(self) -> dict[str, Any]:
        """Return the accuracies and the outcome, for display."""

        def accuracy(result: Evaluation | None) -> float | None:
            return None if result is None else result.accuracy

        return {
            "model": self.model,
            "with_offset": accuracy(self.with_offset),
            "without_offset": accuracy(self.without_offset),
            "local": accuracy(self.local),
            "candidate": self.candidate,
            "validation": accuracy(self.score),
            "test": accuracy(self.tested),
            "served": self.served,
            "reason": self.reason,
        }


def append_decision(file: Path, line: GateDecision) -> None:
    """Append a line durably, readable only by its owner; a line cut off by a crash does not swallow it."""
    is_new = not file.exists()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        about = os.fstat(descriptor)
        if stat.S_ISREG(about.st_mode) and stat.S_IMODE(about.st_mode) != 0o600:  # older versions used the umask
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


def read_decisions(file: Path) -> list[GateDecision]:
    """Return the last line about each model, oldest first; skip lines cut off by a crash."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    # By number, then by digest and fingerprint; each with its position in the file.
    found: defaultdict[int, dict[tuple[str, str], tuple[int, GateDecision]]] = defaultdict(dict)
    for position, part in enumerate(text.split("\n")):
        try:
            line = GateDecision.model_validate_json(part)
        except ValidationError:
            continue
        same_number = found[line.model]
        if line.digest:
            same_number.pop((line.digest, ""), None)  # from when it could not be downloaded
        else:  # from an older agent, which identified models by number
            same_number.clear()
        same_number[line.digest, line.fingerprint] = position, line
    placed = [entry for same_number in found.values() for entry in same_number.values()]
    return [line for _, line in sorted(placed, key=lambda entry: entry[0])]


def compact(file: Path, is_kept: Callable[[GateDecision], bool]) -> None:
    """Shorten a file over MAX_BYTES to its newest lines plus those for which `is_kept` is true.

    A coordinator that announces a new broken model every few seconds must neither fill the disk nor delay a restart.
    """
    if not file.exists() or file.stat().st_size <= MAX_BYTES:
        return
    lines = read_decisions(file)
    staying = [line for line in lines[:-_KEPT_LINES] if is_kept(line)] + lines[-_KEPT_LINES:]
    write_durably(file, b"".join(line.model_dump_json().encode() + b"\n" for line in staying))
