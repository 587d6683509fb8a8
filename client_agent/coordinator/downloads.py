"""Downloads that are checked against the plan as they arrive, and resumed after an interruption."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from client_agent.errors import UnusableModel
from shared.contract.errors import ForeignAnswer, WireError
from shared.tensors.checker import Checker
from shared.tensors.spec import Spec
from shared.tensors.wire import digest

_ETAG = re.compile(r'(W/)?"[\x21\x23-\x7e]{1,128}"')
PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ExpectedDownload:
    """What a download must contain: tensors that match one of the specs, with the given digest or else its ETag."""

    specs: Sequence[Spec]
    size_bytes: int | None = None
    sha256: str | None = None

    def checker(self) -> Checker:
        """Return a checker to feed the body to, piece by piece."""
        return Checker(*self.specs)

    def check_size(self) -> None:
        """Raise UnusableModel if the announced size exceeds what the plan allows, before anything is downloaded."""
        largest = max(spec.max_total_bytes for spec in self.specs)
        if self.size_bytes is not None and not 0 < self.size_bytes <= largest:
            raise UnusableModel(
                f"The coordinator announced {self.size_bytes} bytes; a model of this plan has at most {largest}."
            )


class PartialFile:
    """A partial download that survives interruptions; a second file holds its ETag."""

    def __init__(self, target: Path, expected: ExpectedDownload) -> None:
        self._target, self._expected = target, expected
        self._etag_file = target.with_name(target.name + ".etag")

    def resume_headers(self) -> dict[str, str]:
        """Return headers that ask for the missing part; none if there is nothing to resume."""
        if not (self._target.exists() and self._etag_file.exists()):
            return {}
        have, etag = self._target.stat().st_size, self._etag_file.read_text()
        if not have or not _ETAG.fullmatch(etag) or etag.startswith("W/"):
            return {}
        return {"Range": f"bytes={have}-", "If-Range": etag}

    @contextmanager
    def open(self, response: httpx.Response) -> Iterator[Callable[[bytes], None]]:
        """Yield a function that writes the body of a 200 or 206; it raises WireError at the first wrong byte."""
        if response.status_code == 200:
            etag = response.headers.get("etag", "")
            if not _ETAG.fullmatch(etag):
                raise ForeignAnswer(response.status_code)
            self.remove()
            self._etag_file.write_text(etag)
        elif not self._continues(response):
            self.remove()
            raise ForeignAnswer(response.status_code)
        checker, size_bytes = self._expected.checker(), 0
        with open(self._target, "a+b", opener=_private) as handle:

            def check(piece: bytes) -> None:
                nonlocal size_bytes
                size_bytes += len(piece)
                if self._expected.size_bytes is not None and size_bytes > self._expected.size_bytes:
                    raise WireError(f"It is longer than the announced {self._expected.size_bytes} bytes.")
                checker.feed(piece)

            def write(piece: bytes) -> None:
                check(piece)
                handle.write(piece)

            handle.seek(0)
            while piece := handle.read(PIECE_BYTES):
                check(piece)
            yield write

    def _continues(self, response: httpx.Response) -> bool:
        start = self.resume_headers().get("Range", "").removeprefix("bytes=")
        return bool(start) and response.headers.get("content-range", "").startswith(f"bytes {start}")

    def take(self) -> bytes:
        """Return the complete body and remove the file; raise WireError if the content is wrong."""
        data, etag = self._target.read_bytes(), self._etag_file.read_text()
        self.remove()
        expected = self._expected
        if expected.size_bytes is not None and len(data) != expected.size_bytes:
            raise WireError(f"It has {len(data)} bytes, not the announced {expected.size_bytes}.")
        if digest(data) != (expected.sha256 or etag.strip('"')):
            raise WireError("It does not match its digest.")
        checker = expected.checker()
        checker.feed(data)
        checker.finish()
        return data

    def remove(self) -> None:
        """Discard what has arrived."""
        self._target.unlink(missing_ok=True)
        self._etag_file.unlink(missing_ok=True)

    @property
    def exists(self) -> bool:
        """Whether anything has arrived."""
        return self._target.exists() and self._etag_file.exists()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
