import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dashboard.plan_form import METHOD_SETTINGS, preset_names, read_form, settings_of
from shared.contract.plan import FederationPlan, validate_plan
from shared.contract.presets import DEFAULT_PRESET, PRESETS

SENT = {"name": "pets", "classes": "cat\ndog"}


@pytest.mark.parametrize("preset", PRESETS)
def test_an_empty_form_is_the_preset(preset: str) -> None:
    plan, errors = read_form({**SENT, "preset": preset})
    assert errors == {}
    assert plan == validate_plan({"name": "pets", "classes": ["cat", "dog"], "preset": preset})


def test_every_setting_outside_the_method_has_a_field_with_an_explanation() -> None:
    names = {setting.name for group in settings_of(DEFAULT_PRESET).values() for setting in group}
    tables = {
        name: field.annotation.model_fields
        for name, field in FederationPlan.model_fields.items()
        if name in ("image", "model", "training", "rounds")
    }
    expected = {f"{table}.{name}" for table, fields in tables.items() for name in fields} | {"seed", "averaging"}
    assert names == expected
    assert all(setting.help for group in settings_of(DEFAULT_PRESET).values() for setting in group)


def test_shown_defaults_are_those_of_the_preset() -> None:
    shown = {one.name: one.default for one in settings_of("moon-official")["training"]}
    assert (shown["training.batch_size"], shown["training.clip_norm"]) == ("64", "unset")
    assert preset_names()[0] == DEFAULT_PRESET


def test_errors_are_at_their_fields() -> None:
    _, errors = read_form({**SENT, "classes": "cat", "training.lr": "fast", METHOD_SETTINGS: "alpha ="})
    assert set(errors) == {"classes", "training.lr", METHOD_SETTINGS}
    _, errors = read_form({**SENT, METHOD_SETTINGS: "alfa = 1"})
    assert "did you mean alpha?" in errors[METHOD_SETTINGS][0]
    _, errors = read_form({**SENT, "image.channels": "3", "image.mean": "0.1, 0.2"})
    assert errors


@given(
    st.dictionaries(
        st.sampled_from(["name", "classes", "preset", "rounds.count", "image.mean", METHOD_SETTINGS, "method"]),
        st.text(max_size=40),
    )
)
def test_any_form_is_a_plan_or_explained(sent: dict[str, str]) -> None:
    plan, errors = read_form(sent)
    assert (plan is None) == bool(errors)
    assert all(message for messages in errors.values() for message in messages)
