from hypothesis import given
from hypothesis import strategies as st

from shared.contract.seeds import derive_seed

parts = st.lists(st.text(max_size=5) | st.integers(-9, 9), max_size=4)


def test_seed_is_the_same_on_every_machine() -> None:
    # printf 'int:7\x1fstr:offset\x1fstr:client:a' | sha256sum, the first 8 bytes without the lowest bit
    assert derive_seed(7, "offset", "client:a") == 0x1078040FD6B76F6E >> 1


def test_numbers_and_text_give_different_seeds() -> None:
    assert derive_seed(1) != derive_seed("1")


def test_seed_depends_on_the_order_of_its_parts() -> None:
    assert derive_seed("a", "b") != derive_seed("b", "a")


@given(parts)
def test_seed_has_63_bits(found: list[str | int]) -> None:
    assert 0 <= derive_seed(*found) < 2**63
