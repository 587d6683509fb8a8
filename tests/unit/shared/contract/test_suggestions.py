import pytest

from shared.contract.suggestions import did_you_mean, near_match


@pytest.mark.parametrize(("name", "near"), [("lung", "lungs"), ("LUNGS", "lungs"), ("eyse", "eyes"), ("heart", None)])
def test_nearest_name_is_suggested_only_if_similar(name: str, near: str | None) -> None:
    assert near_match(name, ["eyes", "lungs"]) == near


def test_suggestion_is_phrased_as_a_question() -> None:
    assert did_you_mean("lung", ["lungs"]) == "; did you mean 'lungs'?"
    assert did_you_mean("lung", []) == ""
