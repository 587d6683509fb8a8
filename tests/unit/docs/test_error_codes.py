"""Error codes are found in the source, wherever they are given, and each is explained."""

from pathlib import Path

import pytest

from docs._tools.error_codes import ErrorCode, UnknownCode, collect_error_codes
from docs._tools.troubleshooting import Unexplained, check_explanations

EXPLAINED = {"cause": "It broke.", "remedy": "Fix it."}


def collected(tmp_path: Path, source: str) -> dict[str, ErrorCode]:
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "module.py").write_text(source)
    return collect_error_codes(tmp_path, {"NotFound": 404, "Narrow": 400})


BASES = """
class Base(Exception):
    code = "general"
    def __init__(self, message, *, next_step=None): ...

class Coded(Base):
    def __init__(self, code, message, *, next_step=None): ...

class NotFound(Coded): ...

def problem(status, code, detail, *, next_step=None): ...
"""


def test_class_constants_are_codes_with_the_messages_they_are_raised_with(tmp_path: Path) -> None:
    source = (
        BASES + "class PlanError(Base):\n    code = 'bad-plan'\nraise PlanError(f'{x} is bad.', next_step='Fix it.')"
    )
    codes = collected(tmp_path, source)
    assert list(codes) == ["bad-plan", "general"]
    assert codes["bad-plan"] == ErrorCode(set(), ["… is bad."], ["Fix it."], ["server/module.py"])


def test_codes_in_arguments_have_the_status_of_their_class(tmp_path: Path) -> None:
    codes = collected(tmp_path, BASES + "raise NotFound('no-such-round', 'There is ' + 'none.')")
    assert codes["no-such-round"] == ErrorCode({404}, ["There is none."], [], ["server/module.py"])


def test_wrappers_add_their_status_and_next_step(tmp_path: Path) -> None:
    source = """
def unavailable(code, detail):
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, code, detail, next_step="Try again.")
unavailable("busy", "Too much to do.")
"""
    codes = collected(tmp_path, BASES + source)
    assert codes["busy"] == ErrorCode({503}, ["Too much to do."], ["Try again."], ["server/module.py"])


def test_constructors_that_name_their_code_count_once_with_their_own_status(tmp_path: Path) -> None:
    source = """
class Narrow(NotFound):
    def __init__(self, size):
        super().__init__("too-narrow", f"{size} is too narrow.")
raise Narrow(3)
"""
    codes = collected(tmp_path, BASES + source)
    assert list(codes) == ["general", "too-narrow"]
    assert codes["too-narrow"] == ErrorCode({400}, ["… is too narrow."], [], ["server/module.py"])


def test_codes_of_other_errors_are_handed_on_without_being_counted_again(tmp_path: Path) -> None:
    source = "def again(error):\n    raise NotFound(error.code, error.message)"
    assert list(collected(tmp_path, BASES + source)) == ["general"]


def test_computed_codes_fail_until_they_are_listed(tmp_path: Path) -> None:
    with pytest.raises(UnknownCode, match="COMPUTED"):
        collected(tmp_path, BASES + "raise NotFound(f'no-{kind}', 'Nothing.')")


def test_code_without_an_explanation_fails() -> None:
    with pytest.raises(Unexplained, match="new-code: raised in server/module"):
        check_explanations({"new-code": ErrorCode(places=["server/module.py"])}, {})


def test_explanation_without_a_code_fails() -> None:
    with pytest.raises(Unexplained, match="old-code: no such error code"):
        check_explanations({}, {"old-code": EXPLAINED})


@pytest.mark.parametrize("entry", [{"cause": "It broke."}, EXPLAINED | {"fix": "?"}, EXPLAINED | {"status": "404"}])
def test_explanation_needs_cause_and_remedy_and_nothing_unknown(entry: dict[str, str]) -> None:
    with pytest.raises(Unexplained):
        check_explanations({"a-code": ErrorCode()}, {"a-code": entry})
    check_explanations({"a-code": ErrorCode()}, {"a-code": EXPLAINED})
