"""Secrets from places other users of the machine cannot see: variables, files, pipes, a prompt."""

import getpass
import os
import sys
from pathlib import Path

from shared.contract.errors import DistransError

STDIN = Path("-")
_MAX_CHARACTERS = 64 * 1024


def secret(variable: str) -> str | None:
    """Return the variable's value, or the content of the file named by VARIABLE_FILE; None if neither is set."""
    if value := os.environ.get(variable):
        return value
    file = os.environ.get(variable + "_FILE")
    return read_secret(Path(file), f" ({variable}_FILE)") if file else None


def read_secret(file: Path, origin: str = "") -> str:
    """Return the text of a file, or of standard input for `-`, without surrounding whitespace."""
    try:
        if file == STDIN:
            return sys.stdin.read(_MAX_CHARACTERS).strip()
        with file.open(encoding="utf-8") as handle:
            return handle.read(_MAX_CHARACTERS).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        name = "standard input" if file == STDIN else file
        raise DistransError(f"{name}{origin} cannot be read: {reason}.") from error


def ask_secret(what: str) -> str | None:
    """Ask for a secret on the terminal without echoing it; return None if there is no terminal."""
    if not sys.stdin.isatty():
        return None
    return getpass.getpass(f"{what}: ").strip()
