"""Docstrings as Sphinx expects them. Ours are plain text with `code` between backticks, not reStructuredText."""

import re
from typing import Any

_SPECIAL = re.compile(r"([\\*|]|(?<=\w)_(?!\w))")


def to_rst(lines: list[str]) -> list[str]:
    """Return a docstring with drawings and indented blocks as literal text, and no markup but code elsewhere."""
    converted: list[str] = []
    for paragraph in "\n".join(lines).strip().split("\n\n"):
        parts = paragraph.split("\n")
        if any(part.startswith((" ", "├", "└", "│")) for part in parts) and not parts[0].startswith("- "):
            converted += ["::", "", *(f"    {part}" for part in parts), ""]
        else:
            converted += [*map(_escape, parts), ""]
    return converted


def _escape(line: str) -> str:
    pieces = line.split("`")  # every second piece is code
    return "".join(
        f"``{piece}``" if number % 2 and piece else _SPECIAL.sub(r"\\\1", piece) for number, piece in enumerate(pieces)
    )


def process(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Convert a docstring in place: Sphinx's event `autodoc-process-docstring`."""
    lines[:] = to_rst(lines)
