"""The page's charts, from the body of `/info`."""

import torch

from client_agent.web.pages import figures


def row(model: int, test: float | None, alone: float | None = None) -> dict[str, object]:
    return {"model": model, "test": test, "without_offset": 0.5, "local": alone}


def test_of_several_models_with_one_number_the_last_one_is_drawn() -> None:
    chart = figures.accuracy_chart([row(2, 0.1), row(1, 0.4), row(2, 0.6)])
    assert chart is not None
    assert list(chart.table.columns) == ["round", "what was chosen", "global model"]
    assert chart.table.rows == [["1", "40 %", "50 %"], ["2", "60 %", "50 %"]]


def test_of_many_classes_those_with_the_most_mistakes_are_shown() -> None:
    cells = [(f"class {n:03}", f"class {n:03}", 10) for n in range(200)]
    found = figures.confusion_chart([*cells, ("class 150", "class 199", 4)])
    assert found is not None
    chart, note = found
    assert note == "The 28 of 200 classes with the most mistakes."
    assert {"class 150", "class 199"} <= {line[0] for line in chart.table.rows}


def test_the_class_mix_is_in_shares_and_the_most_frequent_classes_come_first() -> None:
    chart = figures.class_mix_chart({"training": {"cat": 30, "dog": 10}, "predicted": {"eel": 3, "dog": 1}})
    assert chart is not None
    assert list(chart.table.columns) == ["class", "training images", "recent predictions"]
    assert sorted(chart.table.rows) == [["cat", "75 %", "0 %"], ["dog", "25 %", "25 %"], ["eel", "0 %", "75 %"]]
    assert chart.table.rows[-1][0] == "dog"


def test_without_data_there_are_no_charts() -> None:
    assert figures.accuracy_chart([]) is None
    assert figures.accuracy_chart([row(1, None) | {"without_offset": None}]) is None
    assert figures.verdict_chart(None) is None
    assert figures.confusion_chart([]) is None
    assert figures.calibration_chart([], None) is None
    assert figures.offset_chart(None) is None
    assert figures.class_mix_chart({"training": None, "predicted": {}}) is None


def test_an_offset_is_drawn_from_its_tensor() -> None:
    chart = figures.offset_chart(torch.full((1, 4, 4), -0.5, requires_grad=True))
    assert chart is not None
    assert ["minimum", "−0.5"] in chart.table.rows
