"""Horizontal bars, one per name, such as the probabilities of a prediction."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.charts.chart import Chart, Table
from shared.charts.formats import Format, percent
from shared.charts.legend import Entry, legend
from shared.charts.scales import Scale
from shared.charts.svg import element, is_number, picture, shortened

MAX_BARS = 40
_WIDTH, _LABEL, _VALUE, _GAP = 440.0, 132.0, 60.0, 8.0


@dataclass(frozen=True)
class Bar:
    """A name with one value per group; groups share their order in all bars."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class BarOptions:
    """How bars are drawn."""

    groups: Sequence[str] = ("value",)  # at most four
    shown: Format = percent
    full: float | None = None  # the value of a bar across the whole width (None: the largest)
    name_label: str = "name"


_DEFAULT = BarOptions()


def bar_chart(title: str, bars: Sequence[Bar], options: BarOptions = _DEFAULT) -> Chart:
    """Return one bar per name and group, in the given order; no negative values. Names past MAX_BARS are left out."""
    shown = list(bars[:MAX_BARS])
    finite = [value for bar in shown for value in bar.values if is_number(value)]
    scale = Scale(0.0, options.full or max(finite, default=0.0) or 1.0, 0.0, _WIDTH - _LABEL - _VALUE - _GAP)
    thick = 18.0 if len(options.groups) == 1 else 13.0
    entries = [Entry(name, f"bar c{index}", is_area=True) for index, name in enumerate(options.groups, start=1)]
    key, y = legend(entries if len(options.groups) > 1 else [], _WIDTH)
    parts = [key]
    for bar in shown:
        height = thick * len(bar.values)
        name = shortened(bar.name, 18)
        label = element("text", name, x=_LABEL - _GAP, y=y + height / 2, dy=".35em", text_anchor="end", class_="label")
        parts.append(label)
        for index, value in enumerate(bar.values):
            top, length = y + index * thick, scale(value) if is_number(value) else 0.0
            hover = element("title", f"{shortened(bar.name, 60)}: {options.shown(value)}")
            parts.append(
                element(
                    "rect", hover, x=_LABEL, y=top + 1, width=max(1.0, length), height=thick - 2, rx=2,
                    class_=f"bar c{index + 1}",
                )
            )  # fmt: skip
            middle = top + thick / 2
            parts.append(
                element("text", options.shown(value), x=_LABEL + length + 6, y=middle, dy=".35em", class_="value")
            )
        y += height + 8
    best = max(shown, key=lambda bar: bar.values[0], default=None)
    sentence = f"Bar chart: {title}."
    if best is not None:
        sentence += f" The largest of {len(bars)} is {shortened(best.name, 60)} with {options.shown(best.values[0])}."
    note = f"The first {MAX_BARS} of {len(bars)} are shown." if len(bars) > MAX_BARS else ""
    rows = [[shortened(bar.name, 60), *map(options.shown, bar.values)] for bar in shown]
    svg = picture(_WIDTH, max(y, 1.0), sentence, *parts, kind="bars")
    return Chart(title, svg, Table([options.name_label, *options.groups], rows), note)
