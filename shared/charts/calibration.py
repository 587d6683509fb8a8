"""Calibration curves: how often predictions of a given confidence are right."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.charts.axes import HEIGHT, LEFT, WIDTH, Axis, frame
from shared.charts.chart import Chart, Table
from shared.charts.formats import count, percent
from shared.charts.legend import Entry, legend
from shared.charts.svg import element, is_number, number, picture

_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MAX_BINS = 20


@dataclass(frozen=True)
class Bin:
    """Predictions with about the same confidence."""

    confidence: float
    accuracy: float
    images: int


def calibration_curve(title: str, bins: Sequence[Bin], error: float | None = None) -> Chart:
    """Return accuracy over confidence; larger dots stand for more images. Bins without images are left out."""
    used = [one for one in bins if one.images > 0 and is_number(one.confidence) and is_number(one.accuracy)][:_MAX_BINS]
    axis = Axis(_TICKS, percent, "confidence of the prediction")
    grid, x, y = frame(axis, Axis(_TICKS, percent))
    total = max(1, sum(one.images for one in used))
    parts = [grid, element("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="ideal")]
    if len(used) > 1:
        path = "M" + "L".join(f"{number(x(one.confidence))} {number(y(one.accuracy))}" for one in used)
        parts.append(element("path", d=path, class_="line bold c1"))
    for one in used:
        hover = f"{percent(one.confidence)} confident, {percent(one.accuracy)} right on {count(one.images)} images"
        radius = 3 + 9 * (one.images / total) ** 0.5
        dot = element(
            "circle",
            element("title", hover),
            cx=x(one.confidence),
            cy=y(one.accuracy),
            r=radius,
            class_="point neutral",
        )
        parts.append(dot)
    key, height = legend(
        [Entry("share of right answers", "line bold c1"), Entry("perfect calibration", "ideal")], WIDTH, LEFT
    )
    sentence = f"Calibration curve: {title}. {len(used)} bins with {count(sum(one.images for one in used))} images."
    if error is not None and is_number(error):
        sentence += f" The expected calibration error is {percent(error)}."
    body = element("g", *parts, transform=f"translate(0 {number(height)})")
    svg = picture(WIDTH, HEIGHT + height, sentence, key, body, kind="calibration")
    rows = [[percent(one.confidence), percent(one.accuracy), count(one.images)] for one in used]
    note = f"Expected calibration error: {percent(error)}." if error is not None and is_number(error) else ""
    return Chart(title, svg, Table(["confidence", "right", "images"], rows), note)
