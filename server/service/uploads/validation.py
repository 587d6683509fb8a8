"""Validates the body of an update, and computes its digest, while it streams in or is read back."""

import hashlib
from dataclasses import dataclass

from server.core.errors import InvalidInput
from shared.contract.errors import WireError
from shared.tensors.checker import Checker
from shared.tensors.spec import Spec


@dataclass(frozen=True)
class ValidBody:
    """What is known about a body that has been validated in full."""

    size_bytes: int
    digest: str
    metadata: dict[str, str]


class Validation:
    """The validation of one body. `feed` its bytes in order, then `finish`."""

    def __init__(self, spec: Spec) -> None:
        self._checker, self._hash = Checker(spec), hashlib.sha256()
        self.size_bytes = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes; raise InvalidInput at the first invalid one."""
        self._hash.update(data)
        self.size_bytes += len(data)
        try:
            self._checker.feed(data)
        except WireError as error:
            raise _invalid(error) from error

    @property
    def digest(self) -> str:
        """The hexadecimal SHA-256 of the bytes so far."""
        return self._hash.hexdigest()

    def finish(self) -> ValidBody:
        """Return what was found; raise InvalidInput if the body is incomplete."""
        try:
            return ValidBody(self.size_bytes, self.digest, self._checker.finish())
        except WireError as error:
            raise _invalid(error) from error


def _invalid(error: WireError) -> InvalidInput:
    return InvalidInput(error.code, error.message, next_step=error.next_step)
