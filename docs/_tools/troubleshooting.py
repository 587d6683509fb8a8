"""The list of error codes for docs/troubleshooting.md."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs._tools.error_codes import ErrorCode, collect_error_codes
from server.api.errors import STATUSES

EXPLANATIONS = "docs/troubleshooting.toml"
_FIELDS = {"cause": str, "remedy": str, "status": int}


class Unexplained(Exception):
    """Codes and explanations that do not match."""


def render_error_codes(root: Path) -> str:
    """Return one Markdown section per error code."""
    codes = collect_error_codes(root, {kind.__name__: int(status) for kind, status in STATUSES.items()})
    explanations = tomllib.loads((root / EXPLANATIONS).read_text())
    check_explanations(codes, explanations)
    return "\n".join(_section(code, found, explanations[code]) for code, found in codes.items())


def check_explanations(codes: Mapping[str, ErrorCode], explanations: Mapping[str, Any]) -> None:
    """Raise Unexplained unless every code has a cause and a remedy, and every explanation belongs to a code."""
    faults = [
        f"{code}: raised in {', '.join(found.places)}" for code, found in codes.items() if code not in explanations
    ]
    faults += [f"{code}: no such error code" for code in explanations if code not in codes]
    for code, entry in explanations.items():
        faults += [f"{code}: {key} is missing" for key in ("cause", "remedy") if not entry.get(key)]
        faults += [
            f"{code}: {key} is not a field" for key, value in entry.items() if type(value) is not _FIELDS.get(key)
        ]
    if faults:
        raise Unexplained(f"Error codes and {EXPLANATIONS} differ:\n" + "\n".join(faults))


def _section(code: str, found: ErrorCode, explanation: Mapping[str, Any]) -> str:
    statuses = sorted(found.statuses | ({explanation["status"]} if "status" in explanation else set()))
    lines = [f"### `{code}`", ""]
    if statuses:
        lines += [f"HTTP status: {', '.join(map(str, statuses))}", ""]
    lines += [f"**Cause:** {explanation['cause']}", "", f"**Remedy:** {explanation['remedy']}", ""]
    lines += _listed("Messages", found.messages) + _listed("Next steps in the answer", found.next_steps)
    return "\n".join(lines)


def _listed(title: str, texts: list[str]) -> list[str]:
    return [f"{title}:", "", *(f"- {_escaped(text)}" for text in texts), ""] if texts else []


def _escaped(text: str) -> str:
    """Return a message as Markdown that shows it unchanged."""
    for character in "\\`*_<>[]{}$|~#":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
