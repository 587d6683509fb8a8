"""From what services return to charts."""

from collections.abc import Sequence

from server.service.insights.accuracies import History
from server.service.insights.rounds import RoundLine, RoundParts, SitePart
from shared.charts.chart import Chart
from shared.charts.formats import duration, plain
from shared.charts.heatmap import Matrix, count_heatmap
from shared.charts.intervals import Difference, interval_chart
from shared.charts.line import LineOptions, Series, line_chart
from shared.charts.timeline import Row, Segment, timeline
from shared.contract.messages import HeterogeneityView, SiteVerdict

_MODEL = "model"


def accuracy_chart(found: History) -> Chart:
    """Return the pooled accuracy over that of each site."""
    pooled = Series("all sites together", [(float(number), found.accuracy.get(number)) for number in found.numbers])
    sites = [
        Series(name, [(float(number), values.get(number)) for number in found.numbers], is_bold=False)
        for name, values in sorted(found.sites.items())
    ]
    return line_chart("Accuracy on held-out images", [pooled, *sites], LineOptions(_MODEL, bounds=(0.0, 1.0)))


def loss_chart(found: History) -> Chart:
    """Return the pooled loss."""
    pooled = Series("all sites together", [(float(number), found.loss.get(number)) for number in found.numbers])
    return line_chart("Loss on held-out images", [pooled], LineOptions(_MODEL, shown=plain))


def verdict_chart(verdicts: Sequence[SiteVerdict]) -> Chart:
    """Return how much better each site does with what it serves than alone."""
    rows = [
        Difference(
            one.client,
            one.verdict.difference,
            one.verdict.difference_interval.low,
            one.verdict.difference_interval.high,
        )
        for one in verdicts
        if one.verdict.difference is not None
    ]
    rows.sort(key=lambda row: -row.value)
    title = "Accuracy of the served model minus that of training alone, in points"
    return interval_chart(title, rows, "joining pays off", "better alone")


def class_heatmap(found: HeterogeneityView) -> Chart:
    """Return the training images per site and class."""
    names = sorted(found.clients)
    matrix = Matrix(names, found.classes, [found.clients[name] for name in names])
    return count_heatmap("Training images per site and class", matrix, "site")


def round_timeline(found: RoundParts) -> Chart:
    """Return what each site did in a round, the slowest first."""
    rows = [_row(part, found) for part in found.parts]
    rows.sort(key=lambda row: (-sum(one.end - one.start for one in row.segments if one.phase != "waiting"), row.name))
    chart = timeline(f"Round {found.number}, by site", rows)
    note = "Working: downloading, measuring models and uploading. "
    return Chart(chart.title, chart.svg, chart.table, note + chart.note)


def _row(part: SitePart, found: RoundParts) -> Row:
    if part.received_s is not None:
        received = min(part.received_s, found.ended_s) if found.state != "open" else part.received_s
        trained = min(part.training_s or 0.0, received)
        segments = [
            Segment("working", 0.0, received - trained),
            Segment("training", received - trained, received),
            Segment("waiting", received, max(received, found.collected_s)),
        ]
    elif part.upload_began_s is not None:
        segments = [
            Segment("working", 0.0, part.upload_began_s),
            Segment("uploading", part.upload_began_s, found.collected_s),
        ]
    else:
        segments = [Segment("working" if found.state == "open" else "late", 0.0, found.collected_s)]
    if found.ended_s > found.collected_s:
        segments.append(Segment("aggregating", found.collected_s, found.ended_s))
    return Row(part.client, [one for one in segments if one.end > one.start], part.reason)


def rounds_timeline(lines: Sequence[RoundLine]) -> Chart:
    """Return how long the last rounds took, newest first: half of the updates, the last one, the aggregation."""
    rows = []
    for line in lines:
        if line.middle_s is None or line.last_s is None:
            continue
        segments = [Segment("working", 0.0, line.middle_s), Segment("late", line.middle_s, line.last_s)]
        if line.closed_at is not None:
            ended = line.closed_at - line.opened_at
            segments.append(Segment("aggregating", min(line.last_s, ended), ended))
        rows.append(Row(f"round {line.number}", segments, f"{line.slowest} was last, after {duration(line.last_s)}"))
    chart = timeline("How long rounds took", rows, "round")
    note = "Late: from the update in the middle to the last one, for which everybody waited. "
    return Chart(chart.title, chart.svg, chart.table, note + chart.note)
