"""Numbers as people read them."""

import math
from collections.abc import Callable

Format = Callable[[float], str]
MISSING = "–"


def percent(value: float) -> str:
    """Return a share as percent, such as 61.3 %."""
    return _missing(value) or f"{_trimmed(100 * value, 1)} %"


def points(value: float) -> str:
    """Return a difference of two shares in percentage points, with its sign."""
    return _missing(value) or f"{100 * value:+.1f} points".replace("-", "−")


def plain(value: float) -> str:
    """Return a number with up to three significant decimals."""
    if missing := _missing(value):
        return missing
    if value and (abs(value) < 0.001 or abs(value) >= 1e9):
        return f"{value:.1e}".replace("-", "−")
    return _trimmed(value, 3 if abs(value) < 10 else 1).replace("-", "−")


def count(value: float) -> str:
    """Return an integer with thousands separators."""
    return _missing(value) or f"{value:,.0f}"


def duration(value: float) -> str:
    """Return seconds as a duration of at most two units, such as 1 h 5 min."""
    if missing := _missing(value):
        return missing
    if value < 0.95:
        return f"{1000 * value:.0f} ms" if value else "0 s"
    if value < 9.95:
        return f"{_trimmed(value, 1)} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [f"{amount} {unit}" for amount, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s"))]
    found = next(index for index, amount in enumerate((days, hours, minutes, seconds)) if amount)
    return " ".join(unit for unit in units[found : found + 2] if not unit.startswith("0 "))


def size(value: float) -> str:
    """Return bytes in a readable unit, such as 1.2 MB."""
    if missing := _missing(value):
        return missing
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{_trimmed(value, 0 if unit == 'B' or abs(value) >= 99.95 else 1)} {unit}"
        value /= 1000
    return MISSING


def _missing(value: float) -> str:
    return "" if math.isfinite(value) else MISSING


def _trimmed(value: float, digits: int) -> str:
    shown = f"{value:,.{digits}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
