"""What the marks of a chart mean."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from shared.charts.svg import element, joined, shortened

_CHARACTER = 6.6  # an estimate of a letter's width, generous so that larger type on small screens fits too
_SWATCH, _GAP, _ROW = 22.0, 18.0, 22.0


@dataclass(frozen=True)
class Entry:
    """A mark's class and what it stands for."""

    label: str
    kind: str
    is_area: bool = False


def legend(entries: Sequence[Entry], width: float, left: float = 0.0) -> tuple[Markup, float]:
    """Return the entries in rows that fit, and the height they need."""
    if not entries:
        return Markup(""), 0.0
    parts, x, y = [], left, 4.0
    for entry in entries:
        label = shortened(entry.label, 32)
        needed = _SWATCH + 6 + len(label) * _CHARACTER
        if x > left and x + needed > width:
            x, y = left, y + _ROW
        middle = y + _ROW / 2
        if entry.is_area:
            mark = element("rect", x=x + 5, y=middle - 6, width=12, height=12, rx=2, class_=entry.kind)
        else:
            mark = element("line", x1=x, x2=x + _SWATCH, y1=middle, y2=middle, class_=entry.kind)
        parts += [mark, element("text", label, x=x + _SWATCH + 6, y=middle, dy=".35em", class_="key")]
        x += needed + _GAP
    return joined(*parts), y + _ROW
