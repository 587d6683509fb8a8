"""Line charts: bold lines that matter over many thin ones, such as a pooled accuracy over that of each site."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from shared.charts.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, frame
from shared.charts.chart import Chart, Table
from shared.charts.formats import MISSING, Format, percent, plain
from shared.charts.legend import Entry, legend
from shared.charts.scales import Point, Scale, decimate, nice_ticks, spread
from shared.charts.svg import element, is_number, joined, number, picture, shortened

MAX_THIN = 24
MAX_BOLD = 4
_BUCKETS = 120  # stretches of a line of which only the extremes are drawn
_MAX_STRIPS = 100  # places to hover over
_MAX_DOTS = 200


@dataclass(frozen=True)
class Series:
    """A line: points sorted by x, whose y may be missing. Bold lines are in the legend, thin ones in the background."""

    name: str
    points: Sequence[tuple[float, float | None]]
    is_bold: bool = True

    def present(self) -> list[Point]:
        """Return the points that can be drawn."""
        return [(x, y) for x, y in self.points if y is not None and is_number(y) and is_number(x)]


@dataclass(frozen=True)
class LineOptions:
    """How a line chart is drawn."""

    x_label: str = "round"
    y_label: str = ""
    shown: Format = percent
    bounds: tuple[float, float] | None = None  # of the y axis: it never extends beyond them
    thin_label: str = "one site each"


_DEFAULT = LineOptions()


@dataclass(frozen=True)
class _Drawn:
    series: Series
    points: list[Point] = field(repr=False)


def line_chart(title: str, series: Sequence[Series], options: LineOptions = _DEFAULT) -> Chart:
    """Return a chart of the series. Of many thin lines, some from the lowest to the highest are drawn."""
    bold = [_Drawn(one, one.present()) for one in series if one.is_bold][:MAX_BOLD]
    thin, note = _representative([_Drawn(one, one.present()) for one in series if not one.is_bold])
    everything = [point for one in [*bold, *thin] for point in one.points]
    if not everything:
        return Chart(title, _nothing(title), Table([options.x_label], []))
    across = Axis(_whole_ticks(everything), plain, options.x_label)
    grid, x, y = frame(across, Axis(_y_ticks(everything, options.bounds), options.shown))
    lines = [_line(one, x, y, "line thin", options) for one in thin]
    lines += [_line(one, x, y, f"line bold c{index}", options) for index, one in enumerate(bold, start=1)]
    few = sum(len(one.points) for one in thin) <= _MAX_DOTS
    dots = [_dot(one, point, x, y, options) for one in thin for point in one.points] if few else []
    entries = [Entry(one.series.name, f"line bold c{index}") for index, one in enumerate(bold, start=1)]
    if thin:
        entries.append(Entry(options.thin_label, "line thin"))
    strips = _strips(bold, thin, x, options)
    content = [grid, *lines, strips, *dots]
    key, key_height = legend(entries, WIDTH, LEFT)
    svg = picture(
        WIDTH,
        HEIGHT + key_height,
        describe(title, bold, thin, options),
        key,
        element("g", *content, transform=f"translate(0 {number(key_height)})"),
        kind="lines",
    )
    return Chart(title, svg, _table([*bold, *thin], options), note)


def describe(title: str, bold: Sequence[_Drawn], thin: Sequence[_Drawn], options: LineOptions) -> str:
    """Return the chart in a sentence per bold line."""
    parts = [f"Line chart: {title}."]
    for one in bold:
        if one.points:
            (first_x, first), (last_x, last) = one.points[0], one.points[-1]
            parts.append(
                f"{shortened(one.series.name, 40)} goes from {options.shown(first)} at {options.x_label} "
                f"{plain(first_x)} to {options.shown(last)} at {options.x_label} {plain(last_x)}."
            )
    ends = [one.points[-1][1] for one in thin if one.points]
    if ends:
        parts.append(f"Single lines end between {options.shown(min(ends))} and {options.shown(max(ends))}.")
    return " ".join(parts)


def _representative(thin: list[_Drawn]) -> tuple[list[_Drawn], str]:
    drawable = [one for one in thin if one.points]
    if len(drawable) <= MAX_THIN:
        return drawable, ""
    ranked = sorted(drawable, key=lambda one: (one.points[-1][1], one.series.name))
    kept = [ranked[index] for index in spread(range(len(ranked)), MAX_THIN)]
    return kept, f"{MAX_THIN} of {len(ranked)} single lines are drawn, from the lowest to the highest last value."


def _whole_ticks(points: Sequence[Point]) -> list[float]:
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    ticks = nice_ticks(low, high, 7, whole=True)
    inner = [tick for tick in ticks if low <= tick <= high]
    # The lines reach both borders: round numbers in between are enough.
    if len(inner) < 2:
        return ticks
    gap = (inner[1] - inner[0]) / 2
    return [low, *(tick for tick in inner if tick - low >= gap and high - tick >= gap), high]


def _y_ticks(points: Sequence[Point], bounds: tuple[float, float] | None) -> list[float]:
    ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points))
    if bounds is None:
        return ticks
    inside = [tick for tick in ticks if bounds[0] <= tick <= bounds[1]]
    return inside if len(inside) > 1 else list(bounds)


def _line(one: _Drawn, x: Scale, y: Scale, kind: str, options: LineOptions) -> Markup:
    points = decimate(one.points, _BUCKETS)
    if not points:
        return Markup("")
    if len(points) == 1:
        return _dot(one, points[0], x, y, options, f"{kind} single")
    # Relative moves of whole tenths are short; text is most of a page.
    path = "M" + "L".join(f"{number(x(at))} {number(y(value))}" for at, value in points)
    name = shortened(one.series.name, 40)
    return element("path", element("title", f"{name}: {options.shown(points[-1][1])} at the end"), d=path, class_=kind)


def _dot(one: _Drawn, point: Point, x: Scale, y: Scale, options: LineOptions, kind: str = "dot") -> Markup:
    name = f"{shortened(one.series.name, 40)}, {options.x_label} {plain(point[0])}: {options.shown(point[1])}"
    return element("circle", element("title", name), cx=x(point[0]), cy=y(point[1]), r=4, class_=kind)


def _strips(bold: Sequence[_Drawn], thin: Sequence[_Drawn], x: Scale, options: LineOptions) -> Markup:
    """Return transparent columns with the bold values as hover text."""
    found: dict[float, list[str]] = {}
    for one in bold:
        for at, value in one.points:
            found.setdefault(at, []).append(f"{shortened(one.series.name, 40)}: {options.shown(value)}")
    spans: dict[float, tuple[float, float]] = {}
    for one in thin:
        for at, value in one.points:
            low, high = spans.get(at, (value, value))
            spans[at] = (min(low, value), max(high, value))
    places = sorted({*found, *spans})
    places = [places[index] for index in spread(range(len(places)), _MAX_STRIPS)]
    width = (WIDTH - LEFT - RIGHT) / max(1, len(places))
    parts = []
    for at in places:
        lines = [f"{options.x_label} {plain(at)}", *found.get(at, [])]
        if at in spans:
            lines.append(f"single lines: {options.shown(spans[at][0])} … {options.shown(spans[at][1])}")
        parts.append(
            element(
                "rect",
                element("title", "\n".join(lines)),
                x=x(at) - width / 2,
                y=TOP,
                width=width,
                height=HEIGHT - TOP - BOTTOM,
                class_="strip",
            )
        )
    return joined(*parts)


def _table(drawn: Sequence[_Drawn], options: LineOptions) -> Table:
    shown = drawn[: MAX_BOLD + 8]
    values = [dict(one.points) for one in shown]
    places = sorted({at for one in values for at in one})
    rows = [[plain(at), *(options.shown(one[at]) if at in one else MISSING for one in values)] for at in places]
    return Table([options.x_label, *(shortened(one.series.name, 40) for one in shown)], rows)


def _nothing(title: str) -> Markup:
    words = element("text", "no values yet", x=WIDTH / 2, y=HEIGHT / 2, text_anchor="middle", class_="axis-label")
    return picture(WIDTH, HEIGHT, f"Line chart: {title}. No values yet.", words, kind="lines")
