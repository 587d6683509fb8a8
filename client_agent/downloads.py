"""Downloads that are checked against the plan while they arrive, and resumed after an interruption."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from client_agent.errors import UnusableModel
from shared.problems import ForeignAnswer, WireError
from shared.wire import Checker, Spec, digest

_ETAG = re.compile(r'(W/)?"[\x21\x23-\x7e]{1,128}"')
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Expected:
    """What a download must be: tensors that meet one of the specs; its digest is its ETag unless one is given."""

    specs: Sequence[Spec]
    size_bytes: int | None = None
    sha256: str | None = None

    def checker(self) -> Checker:
        """For the body, piece by piece."""
        return Checker(*self.specs)

    def check_size(self) -> None:
        """Refuse a size that no body of the plan has, before anything is fetched."""
        largest = max(spec.max_total_bytes for spec in self.specs)
        if self.size_bytes is not None and not 0 < self.size_bytes <= largest:
            raise UnusableModel(
                f"The coordinator announces {self.size_bytes} bytes; a model of this plan has at most {largest}."
            )


class PartialFile:
    """A download in a file that survives an interruption, with the ETag of what it is a part of beside it."""

    def __init__(self, target: Path, expected: Expected) -> None:
        self._target, self._expected = target, expected
        self._etag_file = target.with_name(target.name + ".etag")

    def resume_headers(self) -> dict[str, str]:
        """Ask for the rest only, if there is a beginning."""
        if not (self._target.exists() and self._etag_file.exists()):
            return {}
        have, etag = self._target.stat().st_size, self._etag_file.read_text()
        if not have or not _ETAG.fullmatch(etag) or etag.startswith("W/"):
            return {}
        return {"Range": f"bytes={have}-", "If-Range": etag}

    @contextmanager
    def open(self, response: httpx.Response) -> Iterator[Callable[[bytes], None]]:
        """Write the body of a 200 or 206; WireError as soon as it cannot be what is expected."""
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
                    raise WireError(f"It is longer than the {self._expected.size_bytes} bytes that were announced.")
                checker.feed(piece)

            def write(piece: bytes) -> None:
                check(piece)
                handle.write(piece)

            handle.seek(0)
            while piece := handle.read(_PIECE_BYTES):
                check(piece)
            yield write

    def _continues(self, response: httpx.Response) -> bool:
        start = self.resume_headers().get("Range", "").removeprefix("bytes=")
        return bool(start) and response.headers.get("content-range", "").startswith(f"bytes {start}")

    def take(self) -> bytes:
        """The whole body, which leaves no file behind; WireError when it is not what is expected."""
        data, etag = self._target.read_bytes(), self._etag_file.read_text()
        self.remove()
        expected = self._expected
        if expected.size_bytes is not None and len(data) != expected.size_bytes:
            raise WireError(f"It has {len(data)} bytes, not {expected.size_bytes} as announced.")
        if digest(data) != (expected.sha256 or etag.strip('"')):
            raise WireError("It does not match its digest.")
        checker = expected.checker()
        checker.feed(data)
        checker.finish()
        return data

    def remove(self) -> None:
        """Forget what has arrived."""
        self._target.unlink(missing_ok=True)
        self._etag_file.unlink(missing_ok=True)

    @property
    def exists(self) -> bool:
        """Whether anything has arrived."""
        return self._target.exists() and self._etag_file.exists()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
