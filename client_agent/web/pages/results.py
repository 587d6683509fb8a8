"""What the network says about images that somebody tried, as bars."""

from collections.abc import Mapping
from dataclasses import dataclass

from client_agent.serving.model import View
from client_agent.serving.queue import PredictionResult
from shared.charts.bars import Bar, BarOptions, bar_chart
from shared.charts.chart import Chart
from shared.charts.formats import percent

_MOST_CLASSES = 5
_LEAST = 0.001  # what is left out would be shown as 0 %


@dataclass(frozen=True)
class Answer:
    """One image: its place in the form, the most probable class, and all of them as bars."""

    index: int
    label: str
    probability: float
    chart: Chart


def answer_charts(result: PredictionResult, views: Mapping[str, View]) -> list[Answer]:
    """Return an answer per image. Its bars are the most probable classes of any view, as served ones first."""
    model, found = result.model, []
    rows = {name: result.probabilities[view] for name, view in views.items()}
    for index in range(len(next(iter(rows.values())))):
        served, *others = (values[index].tolist() for values in rows.values())
        order = sorted(range(len(served)), key=lambda place: -served[place])
        shown = [place for place in order[:_MOST_CLASSES] if served[place] >= _LEAST]
        bests = (max(range(len(values)), key=values.__getitem__) for values in others)
        shown = list(dict.fromkeys([*shown, *bests]))
        bars = [Bar(model.classes[place], [values[place] for values in (served, *others)]) for place in shown]
        label = model.classes[order[0]]
        title = f"Image {index + 1}: {label}, {percent(served[order[0]])}"
        options = BarOptions(groups=tuple(rows), full=1.0, name_label="class")
        found.append(Answer(index, label, served[order[0]], bar_chart(title, bars, options)))
    return found
