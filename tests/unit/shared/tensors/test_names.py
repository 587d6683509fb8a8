from shared.tensors.names import add_prefix, strip_prefix


def test_prefix_is_added_to_every_name() -> None:
    assert add_prefix({"w": 1, "b": 2}, "shared.") == {"shared.w": 1, "shared.b": 2}


def test_stripping_a_prefix_drops_other_names_and_keeps_inner_occurrences() -> None:
    mixed = {"shared.w": 1, "personal.shared.w": 2, "shared.shared.w": 3}
    assert strip_prefix(mixed, "shared.") == {"w": 1, "shared.w": 3}
