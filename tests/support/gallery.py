"""A page with every chart and every building block, to test them and to look at them while changing their design.

`python -m support.gallery FOLDER` (in `tests/`) photographs it at three widths in both themes.
"""

import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route
from support.sockets import serving
from support.web_pages import photograph

from shared.charts.bars import Bar, BarOptions, bar_chart
from shared.charts.calibration import Bin, calibration_curve
from shared.charts.chart import Chart
from shared.charts.heatmap import Matrix, confusion_matrix, count_heatmap
from shared.charts.intervals import Difference, interval_chart
from shared.charts.line import LineOptions, Series, line_chart
from shared.charts.offset import offset_picture
from shared.charts.sparkline import sparkline
from shared.charts.timeline import Row, Segment, timeline
from shared.http import page_files
from shared.http.security_headers import SecurityHeaders
from shared.pages.environment import environment

TEMPLATES = Path(__file__).with_name("gallery_templates")
_CITIES = (
    "north",
    "south",
    "east",
    "west",
    "lake",
    "river",
    "hill",
    "forest",
    "harbor",
    "valley",
    "island",
    "old-town",
)
DIGITS = tuple(map(str, range(10)))


def _random(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - made-up data


def site_names(count: int) -> list[str]:
    """Return names as hospitals have them."""
    return [f"{_CITIES[index % 12]}-hospital{index // 12 or ''}" for index in range(count)]


def accuracy_series(sites: Sequence[str], rounds: int, seed: int = 0) -> list[Series]:
    """Return accuracies that rise and level off, one series per site and a pooled one."""
    draw = _random(seed)
    lines, totals = [], [0.0] * rounds
    for name in sites:
        top, pace = draw.uniform(0.62, 0.93), draw.uniform(4, 12)
        points = []
        for number in range(1, rounds + 1):
            value = top - (top - 0.2) * math.exp(-number / pace) + draw.gauss(0, 0.015)
            value = min(1.0, max(0.0, value))
            totals[number - 1] += value / len(sites)
            points.append((float(number), None if draw.random() < 0.03 else value))
        lines.append(Series(name, points, is_bold=False))
    pooled = Series("all sites together", [(float(number), value) for number, value in enumerate(totals, start=1)])
    return [pooled, *lines]


def round_rows(sites: Sequence[str], seed: int = 1) -> list[Row]:
    """Return what each site did in one round; one of them was slow."""
    draw, rows = _random(seed), []
    for index, name in enumerate(sites):
        wait, train = draw.uniform(1, 9), draw.uniform(60, 130) * (2.3 if index == 4 else 1)
        load = draw.uniform(3, 12)
        moments = [0, wait, wait + train, wait + train + load]
        phases = ("waiting", "training", "uploading")
        segments = [Segment(phase, moments[at], moments[at + 1]) for at, phase in enumerate(phases)]
        rows.append(Row(name, [*segments, Segment("waiting", moments[3], 330), Segment("aggregating", 330, 338)]))
    return rows


def charts(sites: int = 8, rounds: int = 40) -> dict[str, Chart]:
    """Return one chart of each kind."""
    names, draw = site_names(sites), _random(2)
    counts = [[draw.choice((0, 0, draw.randint(1, 40), draw.randint(100, 600))) for _ in DIGITS] for _ in names]
    wrong = [[draw.randint(0, 6) for _ in DIGITS] for _ in DIGITS]
    confusion = [[draw.randint(60, 120) if a == b else wrong[a][b] for b in range(10)] for a in range(10)]
    bins = [Bin((index + 0.5) / 10, min(1.0, (index + 0.2) / 10), 4 + index**3) for index in range(10)]
    grid = np.linspace(-1, 1, 32)
    waves = np.stack([np.sin(3 * (grid[:, None] + shift)) * np.cos(4 * grid[None, :]) for shift in (0, 0.3, 0.9)])
    differences = [
        Difference(name, gain, gain - width, gain + width)
        for name in names
        for gain, width in [(draw.uniform(-0.06, 0.16), draw.uniform(0.02, 0.08))]
    ]
    predictions = [("melanocytic nevus", 0.71, 0.55), ("melanoma", 0.19, 0.31), ("keratosis", 0.07, 0.1)]
    losses = [Series("loss", [(float(n), 2.3 * math.exp(-n / 14) + 0.35) for n in range(1, rounds + 1)])]
    return {
        "accuracy": line_chart("Accuracy over rounds", accuracy_series(names, rounds)),
        "loss": line_chart("Loss over rounds", losses, LineOptions(shown=lambda value: f"{value:.2f}")),
        "verdicts": interval_chart(
            "Served model against training alone", differences, "joining pays off", "better alone"
        ),
        "heatmap": count_heatmap("Images per client and class", Matrix(names, DIGITS, counts)),
        "timeline": timeline("Round 12, by site", round_rows(names)),
        "confusion": confusion_matrix("Predictions on test images", DIGITS, confusion),
        "calibration": calibration_curve("Calibration on test images", bins, 0.083),
        "bars": bar_chart(
            "Probabilities of scan-17.png",
            [Bar(name, values) for name, *values in predictions],
            BarOptions(groups=("with the offset", "without it"), full=1.0),
        ),
        "offset": offset_picture("Offset of north-hospital", 0.2 * waves, 0.37),
    }


def gallery(sites: int = 8, rounds: int = 40) -> str:
    """Return the page."""
    template = environment(TEMPLATES).get_template("gallery.html")
    spark = sparkline("Accuracy of north-hospital", [value for _, value in accuracy_series(["x"], rounds)[1].points])
    return template.render(base="", program="gallery", live_s=0, charts=charts(sites, rounds), spark=spark, now=1e9)


def app() -> SecurityHeaders:
    """Return an application that serves the gallery under the usual policy."""

    def page(request: Request) -> HTMLResponse:
        return HTMLResponse(gallery(int(request.query_params.get("sites", "8")), 40))

    inner = Starlette(routes=[Route("/", page)])
    page_files.install(inner)
    return SecurityHeaders(inner)


if __name__ == "__main__":
    with serving(app()) as url:
        photograph({"gallery": url}, Path(sys.argv[1]))
