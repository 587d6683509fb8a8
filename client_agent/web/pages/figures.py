"""The charts of the page, from the body of `/info`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shared.charts.bars import MAX_BARS, Bar, BarOptions, bar_chart
from shared.charts.calibration import Bin, calibration_curve
from shared.charts.chart import Chart
from shared.charts.heatmap import confusion_matrix
from shared.charts.intervals import Difference, interval_chart
from shared.charts.line import LineOptions, Series, line_chart
from shared.charts.offset import offset_picture

_MOST_CONFUSED = 28  # rows and columns of a readable matrix
_LINES = {"what was chosen": "test", "global model": "without_offset", "this site alone": "local"}


def accuracy_chart(history: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Return accuracies over rounds; of several models with one number, the last one counts."""
    rows = sorted({int(row["model"]): row for row in history}.items())
    series = [
        Series(name, [(float(number), row[key]) for number, row in rows], is_bold=True) for name, key in _LINES.items()
    ]
    used = [one for one in series if one.present()]
    return line_chart("Accuracy over rounds", used, LineOptions(bounds=(0.0, 1.0))) if used else None


def verdict_chart(verdict: Mapping[str, Any] | None) -> Chart | None:
    """Return the difference between the served model and the site's own, with its interval."""
    if verdict is None or verdict["difference"] is None:
        return None
    interval = verdict["difference_interval"]
    row = Difference("served − alone", verdict["difference"], interval["low"], interval["high"])
    return interval_chart("Served model against training alone", [row], "joining pays off", "better alone")


def confusion_chart(cells: Sequence[tuple[str, str, int]]) -> tuple[Chart, str] | None:
    """Return the confusion matrix, and what is left out: of many classes, those with the most mistakes are shown."""
    labels = list(dict.fromkeys([cell[0] for cell in cells] + [cell[1] for cell in cells]))
    if not labels:
        return None
    mistakes = dict.fromkeys(labels, 0)
    for label, predicted, images in cells:
        if label != predicted:
            mistakes[label] += images
            mistakes[predicted] += images
    ranked = set(sorted(labels, key=lambda label: -mistakes[label])[:_MOST_CONFUSED])
    shown = [label for label in labels if label in ranked]
    places = {label: place for place, label in enumerate(shown)}
    counts = [[0.0] * len(shown) for _ in shown]
    for label, predicted, images in cells:
        if label in places and predicted in places:
            counts[places[label]][places[predicted]] = images
    note = f"The {len(shown)} of {len(labels)} classes with the most mistakes." if len(shown) < len(labels) else ""
    return confusion_matrix("Confusion on test images", shown, counts), note


def calibration_chart(bins: Sequence[Mapping[str, Any]], error: float | None) -> Chart | None:
    """Return how often predictions of a given confidence are right."""
    if not bins:
        return None
    return calibration_curve("Calibration on test images", [Bin(**one) for one in bins], error)


def offset_chart(offset: Tensor | None) -> Chart | None:
    """Return this site's offset as a picture."""
    return None if offset is None else offset_picture("Offset of this site", offset.detach().cpu().numpy())


def class_mix_chart(classes: Mapping[str, Any]) -> Chart | None:
    """Return the classes' shares among training images and recent predictions, the most frequent ones first."""
    groups = {"training images": classes["training"] or {}, "recent predictions": classes["predicted"]}
    shares = {name: _shares(counts) for name, counts in groups.items() if counts}
    if not shares:
        return None
    names = {name: max(one.get(name, 0.0) for one in shares.values()) for counts in shares.values() for name in counts}
    shown = sorted(names, key=lambda name: -names[name])[:MAX_BARS]
    bars = [Bar(name, [one.get(name, 0.0) for one in shares.values()]) for name in shown]
    return bar_chart("Class mix", bars, BarOptions(groups=list(shares), name_label="class"))


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()}
