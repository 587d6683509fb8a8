"""What somebody who mistyped a name probably meant."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


def near_match(name: str, names: Iterable[str]) -> str | None:
    """The most similar of the names, whatever their case and separators; None when none is worth a question.

    Only the start of a name counts, so that a stranger's long text costs little.
    """
    by_form = {_fold(known): known for known in names}
    found = get_close_matches(_fold(name[:64]), by_form, n=1, cutoff=0.65)  # "berries" still suggests "berry"
    return by_form[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'lungs'?`, or nothing: for the end of an error message."""
    near = near_match(name, names)
    return "" if near is None else f"; did you mean {near!r}?"


def _fold(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold()) or name
