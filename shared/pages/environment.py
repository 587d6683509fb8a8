"""Jinja2 as both programs use it: everything is escaped, and a missing variable is an error."""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup

from shared import __version__
from shared.charts import formats
from shared.charts.svg import element

STATIC = Path(__file__).parent / "static"
STATIC_PATH = "/static/pages"  # where both programs serve STATIC
_TEMPLATES = Path(__file__).parent / "templates"
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def environment(templates: Path) -> Environment:
    """Return an environment for a program's templates. They extend `shared/layout.html`."""
    shared = PrefixLoader({"shared": FileSystemLoader(_TEMPLATES)})
    env = Environment(
        loader=ChoiceLoader([FileSystemLoader(templates), shared]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: list[Callable[..., object]] = [
        formats.percent,
        formats.points,
        formats.plain,
        formats.count,
        formats.duration,
        formats.size,
        moment,
    ]
    env.filters |= {function.__name__: _or_dash(function) for function in filters}
    env.globals |= {"asset": asset, "version": __version__}
    return env


def _or_dash(function: Callable[..., object]) -> Callable[..., object]:
    """Show what is not known as a dash."""
    return lambda value, *rest: formats.MISSING if value is None else function(value, *rest)


@lru_cache
def asset(name: str) -> str:
    """Return the path of a static file, with its version, so that browsers may keep it."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()
    return f"{STATIC_PATH}/{name}?v={digest[:12]}"


def moment(at: float, now: float) -> Markup:
    """Return a moment as a `<time>`: how long ago, and exactly on hover. live.js keeps it up to date."""
    exact = datetime.fromtimestamp(at, UTC)
    shown = f"{exact:%Y-%m-%d %H:%M:%S} UTC"
    return element(
        "time", relative(at, now), datetime=exact.isoformat(timespec="seconds"), title=shown, data_at=f"{at:.0f}"
    )


def relative(at: float, now: float) -> str:
    """Return a moment relative to now, in the words of live.js."""
    gap = now - at
    length = abs(gap)
    if length < _MINUTE_S:
        return "just now" if gap >= 0 else "in a moment"
    amount, unit = next(
        (int(length // size), unit)
        for size, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min"))
        if length >= size
    )
    return f"{amount} {unit} ago" if gap >= 0 else f"in {amount} {unit}"
