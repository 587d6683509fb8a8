"""Docstrings are shown as they were written."""

from docs._tools.docstrings import to_rst


def test_code_is_code_and_everything_else_is_plain_text() -> None:
    assert to_rst(["Return `a_b` times *x* | name_."]) == [r"Return ``a_b`` times \*x\* \| name\_.", ""]


def test_drawings_stay_as_they_are() -> None:
    drawing = ["Error", "├── A   first", "└── B   *"]
    assert to_rst(["Kinds.", "", *drawing]) == ["Kinds.", "", "::", "", *(f"    {line}" for line in drawing), ""]
