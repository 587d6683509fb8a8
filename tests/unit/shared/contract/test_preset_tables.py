from shared.contract.presets import flatten, merge


def test_merging_goes_into_tables() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"c": 3}, "d": {"e": 1}}) == {
        "a": {"b": 1, "c": 3},
        "d": {"e": 1},
    }


def test_flattened_settings_have_dotted_keys_in_order() -> None:
    tables = {"name": "a", "model": {"backbone": "lenet", "head": {"width": 2}}, "classes": ("x", "y")}
    assert list(flatten(tables)) == [
        ("name", "a"),
        ("model.backbone", "lenet"),
        ("model.head.width", 2),
        ("classes", ("x", "y")),
    ]
