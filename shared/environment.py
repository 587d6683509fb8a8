"""Secrets that a program finds in its environment."""

import os
from pathlib import Path

from shared.problems import DistransError


def secret(variable: str) -> str | None:
    """Return the variable's value, or the content of the file that VARIABLE_FILE names; None without either."""
    if value := os.environ.get(variable):
        return value
    file = os.environ.get(variable + "_FILE")
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise DistransError(f"{file}, which {variable}_FILE names, cannot be read: {reason}.") from error
