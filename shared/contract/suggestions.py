"""Suggestions for mistyped names."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


def near_match(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar name, ignoring case and separators, or None if nothing is close.

    Only the first 64 characters are compared, so that long untrusted input stays cheap.
    """
    by_form = {_fold(known): known for known in names}
    found = get_close_matches(_fold(name[:64]), by_form, n=1, cutoff=0.65)  # "berries" still suggests "berry"
    return by_form[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'lungs'?` to append to an error message, or an empty string."""
    near = near_match(name, names)
    return "" if near is None else f"; did you mean {near!r}?"


def _fold(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold()) or name
