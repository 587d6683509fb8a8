"""Sparklines: a trend the size of a word."""

from collections.abc import Sequence

from markupsafe import Markup

from shared.charts.formats import Format, percent
from shared.charts.scales import Scale, decimate
from shared.charts.svg import element, is_number, number, picture

_WIDTH, _HEIGHT, _EDGE = 120.0, 32.0, 4.0
_BUCKETS = 30


def sparkline(name: str, values: Sequence[float | None], shown: Format = percent) -> Markup:
    """Return a line over the values, with a dot on the last one; a flat line without values."""
    present = [(float(index), value) for index, value in enumerate(values) if value is not None and is_number(value)]
    if not present:
        flat = element("line", x1=_EDGE, x2=_WIDTH - _EDGE, y1=_HEIGHT / 2, y2=_HEIGHT / 2, class_="grid")
        return picture(_WIDTH, _HEIGHT, f"{name}: no values yet.", flat, kind="spark")
    x = Scale(present[0][0], present[-1][0], _EDGE, _WIDTH - _EDGE)
    y = Scale(min(one[1] for one in present), max(one[1] for one in present), _HEIGHT - _EDGE, _EDGE)
    drawn = [(x(at), y(value)) for at, value in decimate(present, _BUCKETS)]
    path = "M" + "L".join(f"{number(at)} {number(value)}" for at, value in drawn)
    end = element("circle", cx=drawn[-1][0], cy=drawn[-1][1], r=3, class_="end")
    sentence = f"{name}: from {shown(present[0][1])} to {shown(present[-1][1])}."
    line = element("path", element("title", sentence), d=path, class_="line bold c1")
    return picture(_WIDTH, _HEIGHT, sentence, line, end, kind="spark")
