import math
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gallery import DIGITS, accuracy_series, charts, round_rows, site_names

from shared.charts.bars import Bar, bar_chart
from shared.charts.calibration import Bin, calibration_curve
from shared.charts.chart import Chart
from shared.charts.heatmap import Matrix, confusion_matrix, count_heatmap
from shared.charts.intervals import Difference, interval_chart
from shared.charts.line import MAX_THIN, Series, line_chart
from shared.charts.offset import offset_picture
from shared.charts.sparkline import sparkline
from shared.charts.timeline import Row, Segment, timeline

HOSTILE = st.text(st.characters(), max_size=80) | st.just("</title><script>alert(1)</script>\x00\ud800\uffff&\"'")
NUMBER = st.floats(allow_nan=True, allow_infinity=True)


def check(chart: Chart) -> ElementTree.Element:
    """Check what holds for every chart, and return its picture."""
    figure = ElementTree.fromstring(chart.__html__())  # noqa: S314 - our own output
    picture = figure.find(".//{http://www.w3.org/2000/svg}svg")
    assert picture is not None
    assert picture.get("role") == "img"
    assert picture.get("aria-label")
    assert not figure.findall(".//script")
    for part in figure.iter():
        assert "style" not in part.attrib
        assert not part.tag.endswith("style")
        assert not any(name.startswith("on") for name in part.attrib)
        assert not any("n" in part.get(name, "") for name in ("d", "x", "y", "width", "height", "cx", "cy", "r"))
    return picture


@given(title=HOSTILE, names=st.lists(HOSTILE, min_size=1, max_size=5), values=st.lists(NUMBER, min_size=1, max_size=5))
def test_any_name_and_any_number_give_well_formed_pictures(title: str, names: list[str], values: list[float]) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    rows = [values for _ in names]
    check(line_chart(title, [Series(name, points, is_bold=index % 2 == 0) for index, name in enumerate(names)]))
    check(bar_chart(title, [Bar(name, [abs(values[0])]) for name in names]))
    check(count_heatmap(title, Matrix(names, [str(index) for index in range(len(values))], rows)))
    check(confusion_matrix(title, names, [[3] * len(names) for _ in names]))
    check(interval_chart(title, [Difference(name, values[0], values[0], values[-1]) for name in names]))
    check(timeline(title, [Row(name, [Segment("training", 0, values[0])], note=title) for name in names]))
    check(calibration_curve(title, [Bin(0.5, value, 3) for value in values], values[0]))
    ElementTree.fromstring(sparkline(title, values))  # noqa: S314 - our own output


@given(st.integers(1, 4), st.integers(1, 90), st.integers(1, 90), NUMBER)
def test_offsets_of_any_shape_and_value_become_small_pictures(
    channels: int, height: int, width: int, value: float
) -> None:
    offset = np.zeros((channels, height, width), dtype=np.float32)
    with np.errstate(over="ignore"):
        offset[0, 0, 0] = value
    chart = offset_picture("offset", offset, motion=0.5)
    check(chart)
    assert len(chart.svg) < 50_000


def test_offset_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="channels × height × width"):
        offset_picture("offset", np.zeros((4, 4)))


@pytest.mark.parametrize("kind", charts(2, 2))
def test_charts_stay_small_with_500_sites_and_1000_rounds(kind: str) -> None:
    chart = charts(500, 1000)[kind]
    check(chart)
    assert len(chart.__html__()) < 130_000


def test_all_charts_of_500_sites_and_1000_rounds_fit_on_one_page() -> None:
    assert sum(len(chart.__html__()) for chart in charts(500, 1000).values()) < 450_000


def test_the_lowest_and_the_highest_line_are_among_those_drawn_and_the_others_are_mentioned() -> None:
    series = [Series(f"site {value:03}", [(1.0, 0.5), (2.0, value / 1000)], is_bold=False) for value in range(200)]
    chart = line_chart("accuracy", series)
    assert f"{MAX_THIN} of 200 single lines" in chart.note
    assert "site 000: 0 % at the end" in chart.svg
    assert "site 199: 19.9 % at the end" in chart.svg


def test_missing_values_leave_a_line_of_the_others() -> None:
    chart = line_chart("loss", [Series("loss", [(1.0, None), (2.0, math.nan), (3.0, 0.5), (4.0, 0.25)])])
    assert "loss goes from 50 % at round 3 to 25 % at round 4" in chart.svg
    assert [row[0] for row in chart.table.rows] == ["3", "4"]


def test_charts_without_data_say_so() -> None:
    assert "no values yet" in check(line_chart("accuracy", [Series("pooled", [])])).find(".//*").text  # type: ignore[operator,union-attr]
    for chart in (bar_chart("b", []), timeline("t", []), interval_chart("i", []), calibration_curve("c", [])):
        check(chart)
    check(count_heatmap("h", Matrix([], DIGITS, [])))


def test_a_difference_is_good_or_bad_only_if_its_interval_excludes_zero() -> None:
    kinds = [Difference("x", 0.1, *interval).kind for interval in ((0.01, 0.2), (-0.01, 0.2), (-0.2, -0.01))]
    assert kinds == ["good", "neutral", "bad"]


def test_the_timeline_names_who_took_longest_and_keeps_them_among_many() -> None:
    chart = timeline("Round 3", round_rows(site_names(300)))
    assert "40 of 300" in chart.note
    slow = timeline("Round 3", [Row(f"site {n}", [Segment("training", 0, 100 + (n == 7))]) for n in range(90)])
    assert "site 7 took longest, 1 min 41 s" in slow.svg


def test_the_confusion_matrix_counts_the_diagonal() -> None:
    chart = confusion_matrix("test", ["a", "b"], [[3, 1], [0, 4]])
    assert "87.5 % of 8 images on the diagonal" in chart.svg
    assert [list(row) for row in chart.table.rows] == [["a", "3", "1"], ["b", "0", "4"]]


def test_tables_have_what_the_picture_shows_and_end_with_the_newest_round() -> None:
    chart = line_chart("accuracy", accuracy_series(site_names(3), 1000))
    figure = ElementTree.fromstring(chart.__html__())  # noqa: S314 - our own output
    rows = figure.findall(".//tbody/tr")
    assert rows[-1].find("th").text == "1,000"  # type: ignore[union-attr]
    assert len(rows) <= 500
