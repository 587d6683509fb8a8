import itertools
import tracemalloc
from collections.abc import Iterable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tensor_bodies import (
    FLOATS,
    MIXED_BODY,
    MIXED_DATA,
    MIXED_HEADER,
    MIXED_SPEC,
    PAIR,
    body,
    entry,
    metadata_tables,
    tensor_sets,
)
from torch import Tensor

from shared.contract.errors import WireError
from shared.tensors.arrays import as_tensors
from shared.tensors.checker import Checker
from shared.tensors.spec import Spec
from shared.tensors.wire import decode, encode


def verdict(pieces: list[bytes], spec: Spec) -> dict[str, str] | str:
    """Return the metadata or the error message of a body that arrives in pieces."""
    checker = Checker(spec)
    try:
        feed_all(checker, pieces)
        return checker.finish()
    except WireError as error:
        return str(error)


def feed_all(checker: Checker, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        checker.feed(piece)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    ends = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw a valid body with random damage."""
    data = bytearray(MIXED_BODY)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        end = min(len(data), position + draw(st.integers(1, 20)))
        match draw(st.sampled_from(["flip", "set", "delete", "insert", "repeat", "swap"])):
            case "flip" if position < len(data):
                data[position] ^= 1 << draw(st.integers(0, 7))
            case "set" if position < len(data):
                data[position] = draw(st.integers(0, 255))
            case "delete":
                del data[position:end]
            case "insert":
                data[position:position] = draw(st.binary(min_size=1, max_size=9))
            case "repeat":
                data[position:position] = data[position:end]
            case "swap":
                data[position:end] = data[position:end][::-1]
    return bytes(data)


# JSON tokens that Python and safetensors might read differently.
TOKENS = [
    *("0", "1", "2", "-0", "-1", "00", "01", "1.0", "1e0", "0e9", "0.0", "-0.0", "1e400", "true", "false", "null"),
    *("NaN", "Infinity", "-Infinity", "[]", "{}", '""', "[0]", "[[]]", "' '", '"\\u0041"', '"\\ud800"', '"\\/"'),
    *('"\\x"', "[0,]", "[,0]", "+1", "0x1", str(2**64), str(2**128)),
]


@st.composite
def damaged_headers(draw: st.DrawFn) -> bytes:
    """Draw a body with some tokens of the header replaced and the header's length corrected."""
    text = MIXED_HEADER.decode()
    for _ in range(draw(st.integers(1, 3))):
        places = [index for index, character in enumerate(text) if character in "0123456789"]
        if not places:
            break
        place = draw(st.sampled_from(places))
        text = text[:place] + draw(st.sampled_from(TOKENS)) + text[place + draw(st.integers(0, 2)) :]
    return body(text.encode(), MIXED_DATA)


class TestFuzz:
    @settings(max_examples=600)
    @given(damaged() | damaged_headers())
    @example(body(MIXED_HEADER.replace(b'"shape":[0,4]', b'"shape":[-0,4]'), MIXED_DATA))
    def test_damage_is_rejected_or_harmless(self, data: bytes) -> None:
        """Neither other exceptions nor bodies that pass the checker but fail to load are acceptable."""
        try:
            received, metadata = decode(data, MIXED_SPEC)
        except WireError:
            return
        assert Spec.of(received) == MIXED_SPEC
        assert all(bool(tensor.isfinite().all()) for tensor in as_tensors(received).values())
        assert all(isinstance(text, str) for item in metadata.items() for text in item)

    @settings(max_examples=300)
    @given(st.binary(max_size=200))
    def test_noise_is_rejected(self, data: bytes) -> None:
        with pytest.raises(WireError):
            decode(data, MIXED_SPEC)

    @settings(max_examples=300)
    @given(st.just(MIXED_BODY) | damaged() | damaged_headers(), st.lists(st.integers(0, 10_000), max_size=8))
    def test_verdict_does_not_depend_on_how_a_body_is_split(self, data: bytes, points: list[int]) -> None:
        whole, parts = verdict([data], MIXED_SPEC), verdict(cut(data, points), MIXED_SPEC)
        if isinstance(whole, str) and "bytes after its last tensor" in whole:
            # In pieces, a bad value may be found before the surplus, and the surplus before all of it has arrived.
            assert isinstance(parts, str)
        else:
            assert parts == whole

    @settings(max_examples=60)
    @given(tensor_sets, metadata_tables)
    def test_body_fed_byte_by_byte_is_accepted(self, sent: dict[str, Tensor], metadata: dict[str, str]) -> None:
        data = encode(sent, metadata)
        assert verdict([bytes([byte]) for byte in data], Spec.of(sent)) == metadata

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_bad_value_is_found_wherever_it_is_split(self, dtype: torch.dtype) -> None:
        sent = {"w": torch.tensor([1.0, float("nan"), 1.0], dtype=dtype)}
        data = encode(sent)
        start = len(data) - 3 * dtype.itemsize
        for first in range(start, len(data) + 1):
            for second in range(first, len(data) + 1):
                found = verdict([data[:first], data[first:second], data[second:]], Spec.of(sent))
                assert isinstance(found, str)
                assert "not finite" in found

    def test_good_value_is_never_misread_wherever_it_is_split(self) -> None:
        """Adjacent bytes 7F 80 are an infinity only at the start of an element."""
        sent = {"w": torch.tensor([0x807F, 0x807F, 0x0080], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)}
        data = encode(sent)
        for first in range(len(data) + 1):
            for second in range(first, len(data) + 1):
                assert verdict([data[:first], data[first:second], data[second:]], Spec.of(sent)) == {}

    def test_memory_views_are_accepted(self) -> None:
        checker = Checker(MIXED_SPEC)
        view = memoryview(MIXED_BODY)
        checker.feed(view[:100])
        checker.feed(view[100:])
        assert checker.finish() == {"round": "3"}


class TestMemory:
    def test_huge_header_is_rejected_before_it_arrives(self) -> None:
        checker = Checker(PAIR)
        checker.feed(bytes(5))
        with pytest.raises(WireError, match=f"claims {2**40} bytes"):
            checker.feed((2**40).to_bytes(8, "little")[5:])

    def test_surplus_is_rejected_before_its_values_are_checked(self) -> None:
        checker = Checker(PAIR)
        checker.feed(body({"w": entry()}))
        with pytest.raises(WireError, match="bytes after its last tensor"):
            checker.feed(bytes(9))

    @pytest.mark.parametrize("piece_bytes", [64 * 1024, 64 * 1024 + 1])
    def test_large_body_is_not_buffered(self, piece_bytes: int) -> None:
        sent = {name: torch.ones(2 * 1024 * 1024) for name in ("a", "b")}
        data = memoryview(encode(sent))
        checker = Checker(Spec.of(sent))
        tracemalloc.start()
        try:
            for start in range(0, len(data), piece_bytes):
                checker.feed(data[start : start + piece_bytes])
            checker.finish()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(data) > 16 * 1024 * 1024
        assert peak < 2 * 1024 * 1024

    def test_endless_header_is_not_buffered(self) -> None:
        """An attacker can make the checker buffer at most the longest valid header."""
        checker = Checker(PAIR)
        tracemalloc.start()
        try:
            checker.feed(PAIR.max_header_bytes.to_bytes(8, "little") + b"{")
            with pytest.raises(WireError, match="not valid JSON"):
                feed_all(checker, itertools.repeat(b" " * 64 * 1024, 1000))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * PAIR.max_header_bytes
