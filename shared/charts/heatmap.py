"""Heatmaps: counts per client and class, and confusion matrices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from shared.charts.chart import Chart, Table
from shared.charts.formats import count, percent
from shared.charts.scales import spread
from shared.charts.svg import element, is_number, picture, shortened

MAX_CELLS = 800
MAX_COLUMNS = 50
STEPS = 8  # classes q0 … q8 in charts.css
_WIDTH, _LABEL, _FOOT = 440.0, 112.0, 32.0
_HEAD, _SLANTED_HEAD = 24.0, 62.0
_MAX_SHOWN_NUMBERS = 12  # columns


@dataclass(frozen=True)
class Matrix:
    """Values by row and column, with their names."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]

    def limited(self) -> tuple["Matrix", str]:
        """Return what fits: columns and rows evenly spaced, and a note about what was left out."""
        columns = spread(range(len(self.columns)), MAX_COLUMNS)
        rows = spread(range(len(self.rows)), max(1, MAX_CELLS // max(1, len(columns))))
        parts = []
        if len(rows) < len(self.rows):
            parts.append(f"{len(rows)} of {len(self.rows)} rows")
        if len(columns) < len(self.columns):
            parts.append(f"{len(columns)} of {len(self.columns)} columns")
        matrix = Matrix(
            [self.rows[row] for row in rows],
            [self.columns[column] for column in columns],
            [[_counted(self.values[row][column]) for column in columns] for row in rows],
        )
        return matrix, f"{' and '.join(parts)} are shown, evenly spaced." if parts else ""


@dataclass(frozen=True)
class _Labels:
    rows: str
    columns: str
    low: str
    high: str


def count_heatmap(title: str, counts: Matrix, row_label: str = "client", column_label: str = "class") -> Chart:
    """Return a heatmap of counts; shades follow their square roots, so that small counts can be told from none."""
    matrix, note = counts.limited()
    largest = max((value for row in matrix.values for value in row), default=0.0)
    shades = [[_shade(math.sqrt(value / largest)) if value else 0 for value in row] for row in matrix.values]
    labels = _Labels(row_label, column_label, "0", f"{count(largest)} images")
    zeros = sum(not _counted(value) for row in counts.values for value in row)
    cells = max(1, len(counts.rows) * len(counts.columns))
    sentence = (
        f"Heatmap: {title}. {len(counts.rows)} rows by {column_label}, {len(counts.columns)} columns; "
        f"{100 * zeros / cells:.0f} % of the cells are empty, the largest is {count(largest)}."
    )
    cell_texts = [[count(value) if value else "" for value in row] for row in matrix.values]
    return _heatmap(title, matrix, shades, cell_texts, sentence, labels, note)


def confusion_matrix(title: str, classes: Sequence[str], counts: Sequence[Sequence[float]]) -> Chart:
    """Return how often each true class (rows) was predicted as each class (columns), as shares of the row."""
    matrix, note = Matrix(classes, classes, counts).limited()
    totals = {name: sum(row) for name, row in zip(classes, counts, strict=True)}
    shares = [
        [value / totals[name] if totals[name] else 0.0 for value in row]
        for name, row in zip(matrix.rows, matrix.values, strict=True)
    ]
    shades = [[_shade(share) for share in row] for row in shares]
    right = sum(counts[index][index] for index in range(len(classes)))
    total = sum(totals.values())
    sentence = f"Confusion matrix: {title}. {len(classes)} classes"
    sentence += f", {percent(right / total)} of {count(total)} images on the diagonal." if total else ", no images yet."
    cell_texts = [[percent(share).removesuffix(" %") if share else "" for share in row] for row in shares]
    labels = _Labels("true class", "predicted class", "0 %", "100 % of the row")
    return _heatmap(title, matrix, shades, cell_texts, sentence, labels, note)


def _counted(value: float) -> float:
    return value if is_number(value) and value > 0 else 0.0


def _shade(share: float) -> int:
    return min(STEPS, math.ceil(share * STEPS))


def _heatmap(
    title: str,
    matrix: Matrix,
    shades: Sequence[Sequence[int]],
    texts: Sequence[Sequence[str]],
    sentence: str,
    labels: _Labels,
    note: str,
) -> Chart:
    width = (_WIDTH - _LABEL) / max(1, len(matrix.columns))
    height = 20.0 if len(matrix.rows) <= 30 else 14.0
    with_numbers = len(matrix.columns) <= _MAX_SHOWN_NUMBERS and height > 15
    names, head = _column_names(matrix.columns, width)
    parts = [names]
    for index, name in enumerate(matrix.rows):
        y = head + index * height
        parts.append(
            element(
                "text", shortened(name, 15), x=_LABEL - 8, y=y + height / 2, dy=".35em", text_anchor="end",
                class_="label" if height > 15 else "label small",
            )
        )  # fmt: skip
        for column, value in enumerate(matrix.values[index]):
            x, shade = _LABEL + column * width, shades[index][column]
            hover = f"{shortened(name, 30)}, {shortened(matrix.columns[column], 30)}: {count(value)}"
            parts.append(
                element(
                    "rect", element("title", hover), x=x + 0.5, y=y + 0.5, width=width - 1, height=height - 1,
                    class_=f"q{shade}",
                )
            )  # fmt: skip
            if with_numbers and texts[index][column]:
                parts.append(
                    element(
                        "text", texts[index][column], x=x + width / 2, y=y + height / 2, dy=".35em",
                        text_anchor="middle", class_=f"cell on{shade}",
                    )
                )  # fmt: skip
    bottom = head + height * len(matrix.rows)
    parts.append(_ramp(bottom + 10, labels))
    svg = picture(_WIDTH, bottom + _FOOT, sentence, *parts, kind="heatmap")
    head_row = [f"{labels.rows} \\ {labels.columns}", *(shortened(name, 30) for name in matrix.columns)]
    rows = [
        [shortened(name, 30), *(count(value) for value in row)]
        for name, row in zip(matrix.rows, matrix.values, strict=True)
    ]
    return Chart(title, svg, Table(head_row, rows), note)


def _column_names(names: Sequence[str], width: float) -> tuple[Markup, float]:
    """Return as many names as fit, slanted if they are long, and the height they need."""
    step = max(1, math.ceil(16 / width))
    shown = [(index, shortened(name, 10)) for index, name in enumerate(names) if index % step == 0]
    slanted = any(len(name) * 7.5 > width * step for _, name in shown)
    height, parts = _SLANTED_HEAD if slanted else _HEAD, []
    for index, name in shown:
        x = _LABEL + (index + 0.5) * width
        turn = f"rotate(-40 {x:.1f} {height - 8:.1f})" if slanted else None
        anchor = "start" if slanted else "middle"
        parts.append(element("text", name, x=x, y=height - 8, text_anchor=anchor, transform=turn, class_="tick"))
    return element("g", *parts), height


def _ramp(y: float, labels: _Labels) -> Markup:
    """Return the legend of the shades."""
    parts = [element("text", labels.low, x=_LABEL, y=y + 10, dy=".35em", class_="key")]
    start = _LABEL + 10.0 + 8 * len(labels.low)
    parts += [
        element("rect", x=start + 16.0 * shade, y=y + 3, width=15, height=14, class_=f"q{shade}")
        for shade in range(STEPS + 1)
    ]
    end = start + 16.0 * (STEPS + 1) + 8
    return element("g", *parts, element("text", labels.high, x=end, y=y + 10, dy=".35em", class_="key"))
