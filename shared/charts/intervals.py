"""Differences with their confidence intervals, one per site: on which side of zero they are, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.charts.chart import Chart, Table
from shared.charts.formats import points
from shared.charts.scales import Scale, nice_ticks
from shared.charts.svg import element, is_number, picture, shortened

MAX_ROWS = 60
_WIDTH, _LABEL, _RIGHT, _ROW, _AXIS = 440.0, 124.0, 20.0, 22.0, 44.0


@dataclass(frozen=True)
class Difference:
    """A difference of two shares and its interval."""

    name: str
    value: float
    low: float
    high: float

    @property
    def kind(self) -> str:
        """Which side of zero it is on for sure."""
        return "good" if self.low > 0 else "bad" if self.high < 0 else "neutral"


def interval_chart(title: str, rows: Sequence[Difference], better: str = "better", worse: str = "worse") -> Chart:
    """Return a dot with its interval per row. Rows past MAX_ROWS are left out."""
    usable = [row for row in rows if all(map(is_number, (row.value, row.low, row.high)))]
    shown = usable[:MAX_ROWS]
    low, high = min((row.low for row in shown), default=0.0), max((row.high for row in shown), default=0.0)
    ticks = nice_ticks(min(low, -0.01), max(high, 0.01), 5)
    scale, bottom = Scale(ticks[0], ticks[-1], _LABEL, _WIDTH - _RIGHT), 8 + _ROW * len(shown)
    parts = []
    for tick in ticks:
        kind = "grid" if tick else "zero"
        parts.append(element("line", x1=scale(tick), x2=scale(tick), y1=4, y2=bottom, class_=kind))
        mark = points(tick).removesuffix(".0 points").removesuffix(" points") if tick else "0"
        parts.append(element("text", mark, x=scale(tick), y=bottom + 16, text_anchor="middle", class_="tick"))
    for index, row in enumerate(shown):
        y = 8 + _ROW * (index + 0.5)
        hover = f"{shortened(row.name, 60)}: {points(row.value)}, 95 % interval {points(row.low)} to {points(row.high)}"
        name = shortened(row.name, 17)
        parts += [
            element("text", name, x=_LABEL - 12, y=y, dy=".35em", text_anchor="end", class_="label"),
            element(
                "g",
                element("title", hover),
                element("line", x1=scale(row.low), x2=scale(row.high), y1=y, y2=y, class_=f"whisker {row.kind}"),
                element("circle", cx=scale(row.value), cy=y, r=5, class_=f"point {row.kind}"),
            ),
        ]
    middle = bottom + 36
    parts.append(element("text", f"← {worse}", x=scale(0) - 10, y=middle, text_anchor="end", class_="axis-label"))
    parts.append(element("text", f"{better} →", x=scale(0) + 10, y=middle, class_="axis-label"))
    above, below = sum(row.low > 0 for row in usable), sum(row.high < 0 for row in usable)
    sentence = (
        f"Interval chart: {title}. Of {len(usable)}, {above} are above zero for sure, {below} below, and "
        f"{len(usable) - above - below} undecided."
    )
    note = f"The first {MAX_ROWS} of {len(usable)} are shown." if len(usable) > MAX_ROWS else ""
    table = [[shortened(row.name, 60), points(row.value), points(row.low), points(row.high)] for row in shown]
    svg = picture(_WIDTH, bottom + _AXIS, sentence, *parts, kind="intervals")
    return Chart(title, svg, Table(["site", "difference", "low (95 %)", "high (95 %)"], table), note)
