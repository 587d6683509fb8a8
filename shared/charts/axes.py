"""The frame of a chart: grid lines, ticks and labels, with room for larger type on small screens."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from shared.charts.formats import Format
from shared.charts.scales import Scale
from shared.charts.svg import element, joined

WIDTH, HEIGHT = 440.0, 250.0
TOP, RIGHT, BOTTOM, LEFT = 12.0, 14.0, 48.0, 52.0
_TICK_GAP = 8.0


@dataclass(frozen=True)
class Axis:
    """The ticks of one axis, how to show them, and what they measure."""

    ticks: Sequence[float]
    shown: Format
    label: str = ""

    def scale(self, start: float, end: float) -> Scale:
        """Return the map from values to coordinates."""
        return Scale(self.ticks[0], self.ticks[-1], start, end)


def frame(across: Axis, up: Axis, height: float = HEIGHT) -> tuple[Markup, Scale, Scale]:
    """Return grid and axes, and the scales of the plotting area."""
    x, y = across.scale(LEFT, WIDTH - RIGHT), up.scale(height - BOTTOM, TOP)
    parts = []
    for tick in up.ticks:
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="grid"))
        parts.append(
            element("text", up.shown(tick), x=LEFT - _TICK_GAP, y=y(tick), dy=".35em", text_anchor="end", class_="tick")
        )
    for index, tick in enumerate(across.ticks):
        # The outermost ticks stay inside the picture.
        anchor = "end" if index and index == len(across.ticks) - 1 else "middle"
        at = x(tick) + (RIGHT / 2 if anchor == "end" else 0)
        parts.append(
            element("text", across.shown(tick), x=at, y=height - BOTTOM + 20, text_anchor=anchor, class_="tick")
        )
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=height - BOTTOM, y2=height - BOTTOM, class_="axis"))
    if across.label:
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(element("text", across.label, x=middle, y=height - 8, text_anchor="middle", class_="axis-label"))
    return joined(*parts), x, y
