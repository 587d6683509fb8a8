"""Timelines: what happened when, a row per site or round, in phases."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.charts.chart import Chart, Table
from shared.charts.formats import Format, duration
from shared.charts.legend import Entry, legend
from shared.charts.scales import Scale, nice_ticks
from shared.charts.svg import element, is_number, picture, shortened

MAX_ROWS = 40
PHASES = (
    "working",
    "training",
    "uploading",
    "late",
    "waiting",
    "aggregating",
)  # classes of the same names in charts.css
_WIDTH, _LABEL, _RIGHT, _ROW = 840.0, 130.0, 24.0, 22.0
_MAX_SEGMENTS = 12  # per row
_UNITS = (1.0, 60.0, 3600.0, 86400.0)


@dataclass(frozen=True)
class Segment:
    """A phase from one moment to another, in seconds from the left."""

    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class Row:
    """A site or a round, with what it did."""

    name: str
    segments: Sequence[Segment]
    note: str = ""  # for the hover text

    @property
    def end(self) -> float:
        """When its last phase ended."""
        return max((one.end for one in self.segments), default=0.0)


def timeline(title: str, rows: Sequence[Row], row_label: str = "site", shown: Format = duration) -> Chart:
    """Return a row per site. Of many, the ones that took longest are shown, in the given order."""
    kept = {id(row) for row in sorted(rows, key=lambda row: -row.end)[:MAX_ROWS]}
    drawn = [row for row in rows if id(row) in kept]
    last = max((row.end for row in drawn if is_number(row.end)), default=0.0)
    unit = max((unit for unit in _UNITS if unit * 3 <= last), default=1.0)
    ticks = [tick * unit for tick in nice_ticks(0.0, max(last / unit, 1e-6), 7)]
    used = [phase for phase in PHASES if any(one.phase == phase for row in drawn for one in row.segments)]
    key, top = legend([Entry(phase, f"phase {phase}", is_area=True) for phase in used], _WIDTH, _LABEL)
    scale, bottom = Scale(0.0, ticks[-1], _LABEL, _WIDTH - _RIGHT), top + 6 + _ROW * len(drawn)
    parts = [key]
    for tick in ticks:
        parts.append(element("line", x1=scale(tick), x2=scale(tick), y1=top + 2, y2=bottom, class_="grid"))
        anchor = "end" if tick == ticks[-1] else "middle"
        at = scale(tick) + (_RIGHT / 2 if anchor == "end" else 0)
        parts.append(element("text", shown(tick), x=at, y=bottom + 18, text_anchor=anchor, class_="tick"))
    table = []
    for index, row in enumerate(drawn):
        y = top + 6 + _ROW * index
        name = shortened(row.name, 17)
        parts.append(element("text", name, x=_LABEL - 8, y=y + _ROW / 2, dy=".35em", text_anchor="end", class_="label"))
        for one in row.segments[:_MAX_SEGMENTS]:
            if not (is_number(one.start) and is_number(one.end)) or one.end < one.start or one.phase not in PHASES:
                continue
            hover = f"{shortened(row.name, 40)}: {one.phase} for {shown(one.end - one.start)}"
            hover += f"\n{shortened(row.note, 80)}" if row.note else ""
            parts.append(
                element(
                    "rect", element("title", hover), x=scale(one.start), y=y + 3,
                    width=max(1.0, scale(one.end) - scale(one.start)), height=_ROW - 6, class_=f"phase {one.phase}",
                )
            )  # fmt: skip
        spent = {phase: sum(one.end - one.start for one in row.segments if one.phase == phase) for phase in used}
        table.append([shortened(row.name, 40), *(shown(spent[phase]) for phase in used), shown(row.end)])
    slowest = max(drawn, key=lambda row: row.end, default=None)
    sentence = f"Timeline: {title}, {len(rows)} rows."
    if slowest is not None:
        sentence += f" {shortened(slowest.name, 40)} took longest, {shown(slowest.end)}."
    note = f"The {len(drawn)} of {len(rows)} that took longest are shown." if len(drawn) < len(rows) else ""
    svg = picture(_WIDTH, bottom + 28, sentence, *parts, kind="timeline")
    return Chart(title, svg, Table([row_label, *used, "in all"], table), note)
