import base64
import hashlib
import itertools
import json
import struct
import sys
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.limits import MAX_ABSOLUTE, MAX_INTEGER, MAX_WEIGHT
from shared.problems import WireError
from shared.wire import MAX_METADATA_BYTES, Checker, Entry, Spec, decode, digest, digest_header, encode

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", "'", "a.b", "größe", "名前", "🦉", "\u0000", "dtype", ""]
)
names = texts.filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 3), max_size=3)
metadata_tables = st.dictionaries(texts, texts, max_size=4)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    shape, dtype = draw(shapes), draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (0, 128)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


tensor_sets = st.dictionaries(names, tensors(), max_size=5)


def body(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A body put together by hand: `header` as JSON, or as it is where it is bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def check(data: bytes, spec: Spec) -> dict[str, str]:
    checker = Checker(spec)
    checker.feed(data)
    return checker.finish()


def equal_sets(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


PAIR = Spec({"w": Entry((2,), torch.float32)})
PAIR_DATA = struct.pack("<2f", 1.5, -2.5)

MIXED = {
    "conv.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "steps": torch.tensor(41),
    "half": torch.tensor([0.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([[3.0]], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "nothing": torch.zeros(0, 4),
}
MIXED_SPEC = Spec.of(MIXED)
MIXED_BODY = encode(MIXED, {"round": "3"})
_length = int.from_bytes(MIXED_BODY[:8], "little")
MIXED_HEADER, MIXED_DATA = MIXED_BODY[8 : 8 + _length], MIXED_BODY[8 + _length :]


class TestRoundTrip:
    @given(tensor_sets, metadata_tables)
    def test_what_is_encoded_is_decoded(self, sent: dict[str, Tensor], metadata: dict[str, str]) -> None:
        received, received_metadata = decode(encode(sent, metadata), Spec.of(sent))
        assert equal_sets(received, sent)
        assert received_metadata == metadata

    @given(tensor_sets, metadata_tables)
    def test_the_safetensors_library_reads_what_is_encoded(
        self, sent: dict[str, Tensor], metadata: dict[str, str]
    ) -> None:
        assert equal_sets(safetensors.torch.load(encode(sent, metadata)), sent)

    @given(tensor_sets, metadata_tables)
    def test_what_the_safetensors_library_writes_is_decoded(
        self, sent: dict[str, Tensor], metadata: dict[str, str]
    ) -> None:
        received, received_metadata = decode(safetensors.torch.save(sent, metadata or None), Spec.of(sent))
        assert equal_sets(received, sent)
        assert received_metadata == metadata

    @given(tensor_sets, metadata_tables, st.randoms(use_true_random=False))
    def test_the_order_of_the_tables_does_not_matter(
        self, sent: dict[str, Tensor], metadata: dict[str, str], random: Any
    ) -> None:
        def shuffled(table: dict[str, Any]) -> dict[str, Any]:
            return dict(random.sample(sorted(table.items()), len(table)))

        assert encode(shuffled(sent), shuffled(metadata)) == encode(sent, metadata)

    @given(tensor_sets, metadata_tables)
    def test_no_valid_body_is_longer_than_the_spec_says(
        self, sent: dict[str, Tensor], metadata: dict[str, str]
    ) -> None:
        assert len(encode(sent, metadata)) <= Spec.of(sent).max_total_bytes

    def test_strided_and_trained_tensors_are_encoded_by_value(self) -> None:
        parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        received, _ = decode(encode({"w": parameter.t()}), Spec({"w": Entry((3, 2), torch.float32)}))
        assert received["w"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert not received["w"].requires_grad

    def test_no_tensors_at_all(self) -> None:
        assert decode(encode({}), Spec({})) == ({}, {})

    def test_data_may_lie_in_another_order_than_the_header_names_it(self) -> None:
        spec = Spec({"a": Entry((1,), torch.float32), "b": Entry((1,), torch.float32)})
        header = {"a": entry(shape=[1], offsets=[4, 8]), "b": entry(shape=[1], offsets=[0, 4])}
        received, _ = decode(body(header, struct.pack("<2f", 7, 9)), spec)
        assert (received["b"].item(), received["a"].item()) == (7, 9)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_the_extremes_of_a_dtype_are_fine(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        limit = min(info.max, MAX_ABSOLUTE / MAX_WEIGHT / 2)
        sent = {"w": torch.tensor([limit, -limit, info.tiny, info.smallest_normal / 2, 0.0, -0.0], dtype=dtype)}
        assert equal_sets(decode(encode(sent), Spec.of(sent))[0], sent)

    @pytest.mark.parametrize("dtype", INTEGERS, ids=str)
    def test_the_extremes_of_an_integer_dtype_are_fine(self, dtype: torch.dtype) -> None:
        info = torch.iinfo(dtype)
        sent = {"w": torch.tensor([max(info.min, -MAX_INTEGER), min(info.max, MAX_INTEGER)], dtype=dtype)}
        assert equal_sets(decode(encode(sent), Spec.of(sent))[0], sent)


class TestSpec:
    def test_of_tensors_without_memory(self) -> None:
        with torch.device("meta"):
            spec = Spec.of(torch.nn.Linear(3, 2).state_dict())
        assert spec.entries == {
            "weight": Entry((2, 3), torch.float32),
            "bias": Entry((2,), torch.float32),
        }

    def test_sizes(self) -> None:
        assert MIXED_SPEC.data_bytes == 6 * 4 + 8 + 2 * 2 + 2 + 3

    def test_prefix_and_union(self) -> None:
        both = PAIR.prefixed("shared.") | PAIR.prefixed("personal.")
        assert both.entries.keys() == {"shared.w", "personal.w"}
        assert both.data_bytes == 16


class TestDigest:
    def test_known_values(self) -> None:
        assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

    def test_header_form(self) -> None:
        assert digest_header(digest(b"")) == "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"

    @given(st.binary(max_size=50))
    def test_header_holds_the_same_digest(self, data: bytes) -> None:
        algorithm, _, value = digest_header(digest(data)).partition("=")
        assert algorithm == "sha-256"
        assert base64.b64decode(value.strip(":")) == hashlib.sha256(data).digest()


class TestRefused:
    def test_every_truncation(self) -> None:
        for length in range(len(MIXED_BODY)):
            with pytest.raises(WireError, match=r"ends inside its header|ends \d+ bytes too early") as caught:
                decode(MIXED_BODY[:length], MIXED_SPEC)
            assert caught.value.next_step == "Send it again in full."

    def test_truncation_says_how_much_is_missing(self) -> None:
        with pytest.raises(WireError, match="ends 5 bytes too early"):
            decode(MIXED_BODY[:-5], MIXED_SPEC)

    @pytest.mark.parametrize("extra", [1, 8, 1000])
    def test_trailing_bytes(self, extra: int) -> None:
        with pytest.raises(WireError, match=f"at least {extra} bytes after its last tensor"):
            decode(MIXED_BODY + bytes(extra), MIXED_SPEC)

    def test_trailing_bytes_behind_a_body_without_data(self) -> None:
        with pytest.raises(WireError, match="at least 1 bytes after"):
            decode(encode({}) + b"\0", Spec({}))

    def test_missing_tensor(self) -> None:
        with pytest.raises(WireError, match=r"lacks 1 tensors \('w' …\)") as caught:
            decode(encode({}), PAIR)
        assert caught.value.next_step is not None
        assert "another plan" in caught.value.next_step

    def test_unknown_tensor(self) -> None:
        with pytest.raises(WireError, match=r"has 1 unknown ones \('extra' …\)"):
            decode(encode({"w": torch.ones(2), "extra": torch.ones(1)}), PAIR)

    def test_renamed_tensor(self) -> None:
        with pytest.raises(WireError, match=r"lacks 1 tensors \('w' …\) and has 1 unknown ones \('W' …\)"):
            decode(encode({"W": torch.ones(2)}), PAIR)

    def test_long_and_many_unknown_names_are_cut_in_the_message(self) -> None:
        sent = {f"{number}{'x' * 500}": torch.ones(1) for number in range(50)}
        with pytest.raises(WireError, match="has 50 unknown ones") as caught:
            decode(encode(sent), PAIR)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize("found", ["F16", "BF16", "I32", "U32", "f32", "", None, 32, ["F32"], {}])
    def test_wrong_dtype(self, found: Any) -> None:
        with pytest.raises(WireError, match=r"'w' has dtype .* expected 'F32'"):
            decode(body({"w": entry(dtype=found)}, PAIR_DATA), PAIR)

    @pytest.mark.parametrize(
        "found", [[], [1], [3], [2, 1], [1, 2], [-2], "2", 2, None, {}, [[2]], ["2"], [2.0], [None], [2**70]]
    )
    def test_wrong_shape(self, found: Any) -> None:
        with pytest.raises(WireError, match=r"'w' has shape .* expected \[2\]"):
            decode(body({"w": entry(shape=found)}, PAIR_DATA), PAIR)

    @pytest.mark.parametrize("found", ["true", "1.0", "1e0", '"1"'])
    def test_shape_that_only_equals_one_in_python(self, found: str) -> None:
        text = '{"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % found  # noqa: UP031 - braces abound
        with pytest.raises(WireError, match="'w' has shape"):
            decode(body(text.encode(), bytes(4)), Spec({"w": Entry((1,), torch.float32)}))

    @pytest.mark.parametrize("found", ["false,1", "0,true", "0.0,1", "0,1.0", "0,1e0", "-0,1"])
    def test_offsets_that_only_equal_zero_and_one_in_python(self, found: str) -> None:
        text = '{"w":{"dtype":"U8","shape":[],"data_offsets":[%s]}}' % found  # noqa: UP031
        with pytest.raises(WireError, match="does not span the 1 bytes"):
            decode(body(text.encode(), bytes(1)), Spec({"w": Entry((), torch.uint8)}))

    def test_minus_zero_is_no_size(self) -> None:
        """The library reads -0 as a floating-point number and refuses it."""
        text = b'{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'
        with pytest.raises(WireError, match="'w' has shape"):
            decode(body(text), Spec({"w": Entry((0,), torch.float32)}))

    @pytest.mark.parametrize(
        "found",
        [[0, 4], [0, 16], [8, 0], [0], [], [0, 8, 8], [0, 4, 8], "08", None, {"0": 8}, [-8, 0], [0, None], 8],
    )
    def test_offsets_that_do_not_span_the_shape(self, found: Any) -> None:
        with pytest.raises(WireError, match="'w' does not span the 8 bytes of its shape"):
            decode(body({"w": entry(offsets=found)}, PAIR_DATA), PAIR)

    @pytest.mark.parametrize(
        ("second", "at"),
        [([4, 12], "byte 4 of the data, not at 8"), ([0, 8], "byte 0 of the data, not at 8"), ([12, 20], "byte 12")],
        ids=["overlap", "same place", "gap"],
    )
    def test_overlaps_and_gaps(self, second: list[int], at: str) -> None:
        spec = PAIR | Spec({"x": Entry((2,), torch.float32)})
        data = body({"w": entry(), "x": entry(offsets=second)}, bytes(16))
        with pytest.raises(WireError, match=f"starts at {at}"):
            decode(data, spec)

    @pytest.mark.parametrize("start", [1, 8, 2**63, 10**30])
    def test_gap_before_the_first_tensor(self, start: int) -> None:
        with pytest.raises(WireError, match=f"starts at byte {start} of the data, not at 0"):
            decode(body({"w": entry(offsets=[start, start + 8])}, bytes(8)), PAIR)

    def test_empty_tensor_in_the_middle_of_another(self) -> None:
        spec = PAIR | Spec({"x": Entry((0,), torch.float32)})
        with pytest.raises(WireError, match="'x' starts at byte 4 of the data, not at 8"):
            decode(body({"w": entry(), "x": entry(shape=[0], offsets=[4, 4])}, PAIR_DATA), spec)

    @pytest.mark.parametrize(
        "text",
        [
            '{"w":ENTRY,"w":ENTRY}',
            '{"w":ENTRY,"\\u0077":ENTRY}',
            '{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            '{"w":ENTRY,"__metadata__":{"a":"1","a":"2"}}',
            '{"__metadata__":{},"w":ENTRY,"__metadata__":{}}',
        ],
    )
    def test_repeated_keys(self, text: str) -> None:
        text = text.replace("ENTRY", json.dumps(entry()))
        with pytest.raises(WireError, match="not JSON with each key once"):
            decode(body(text.encode(), PAIR_DATA), PAIR)

    @pytest.mark.parametrize(
        "found", [None, [], "F32", 3, {}, {"dtype": "F32", "shape": [2]}, {**entry(), "more": 1}], ids=repr
    )
    def test_malformed_entry(self, found: Any) -> None:
        with pytest.raises(WireError, match="entry for tensor 'w' is malformed"):
            decode(body({"w": found}, PAIR_DATA), PAIR)

    @pytest.mark.parametrize("length", [0, 1, 2**31, 2**40, 2**60, 2**64 - 1])
    def test_header_length_out_of_bounds(self, length: int) -> None:
        with pytest.raises(WireError, match=f"The header claims {length} bytes; at most"):
            decode(body({"w": entry()}, PAIR_DATA, length=length), PAIR)

    def test_header_length_just_past_the_limit(self) -> None:
        limit = PAIR.max_header_bytes
        text = json.dumps({"w": entry()}).encode()
        assert check(body(text.ljust(limit), PAIR_DATA), PAIR) == {}
        with pytest.raises(WireError, match=f"claims {limit + 1} bytes; at most {limit} are allowed"):
            decode(body(text.ljust(limit + 1), PAIR_DATA), PAIR)

    def test_header_that_reaches_beyond_the_body(self) -> None:
        whole = body({"w": entry()}, PAIR_DATA)
        with pytest.raises(WireError, match="ends inside its header"):
            decode(body({"w": entry()}, PAIR_DATA, length=len(whole)), PAIR)

    @pytest.mark.parametrize(
        "text",
        [
            b"not JSON",
            b"{" * 20,
            b'{"w": }',
            b"{'w': 1}",
            b"{} {}",
            b"{}\0",
            b"\0\0\0\0",
            b"\xff\xfe{}",
            '{"w": 1}'.encode("utf-16"),
            '{"w": 1}'.encode("utf-16-le"),
            '{"w": 1}'.encode("utf-32"),
            b"\xef\xbb\xbf{}",
            b'{"\xff": 1}',
            b'{"\xed\xa0\x80": 1}',
            b'{"w": ' + b"9" * 5000 + b"}",
            b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"w":' * 30_000 + b"1" + b"}" * 30_000,
        ],
        ids=lambda text: repr(text[:12]),
    )
    def test_header_that_is_not_json(self, text: bytes) -> None:
        with pytest.raises(WireError, match="not JSON with each key once"):
            decode(body(text, PAIR_DATA), PAIR)

    @pytest.mark.parametrize("text", [b"[]", b'"w"', b"12", b"null", b"NaN", b"true", b'["w"]'], ids=repr)
    def test_header_that_is_no_object(self, text: bytes) -> None:
        with pytest.raises(WireError, match="not a JSON object"):
            decode(body(text, PAIR_DATA), PAIR)

    @pytest.mark.parametrize("lead", [b" ", b"\n", b"\t"])
    def test_header_that_starts_with_white_space(self, lead: bytes) -> None:
        """The safetensors format asks for the brace at once."""
        with pytest.raises(WireError, match="not a JSON object"):
            decode(body(lead + json.dumps({"w": entry()}).encode(), PAIR_DATA), PAIR)

    @pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", None])
    def test_nesting_close_to_pythons_limit(self, field: str | None) -> None:
        """What the JSON reader can still follow, the message about it must be able to show."""
        limit = sys.getrecursionlimit()
        for depth in range(limit - 200, limit + 20):
            nested = "[" * depth + "]" * depth
            text = json.dumps({"w": entry() | {field: "HERE"} if field else "HERE"}).replace('"HERE"', nested)
            with pytest.raises(WireError):
                check(body(text.encode(), PAIR_DATA), PAIR)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("at", [0, 3, 6])
    def test_not_finite(self, dtype: torch.dtype, bad: float, at: int) -> None:
        sent = {"w": torch.ones(7, dtype=dtype)}
        sent["w"][at] = bad
        with pytest.raises(WireError, match="'w' holds a value that is not finite or far too large") as caught:
            decode(encode(sent), Spec.of(sent))
        assert caught.value.next_step is not None
        assert "learning rate" in caught.value.next_step

    @pytest.mark.parametrize(("dtype", "bits"), [("F16", 0x7C01), ("F16", 0xFE00), ("BF16", 0x7F81), ("BF16", 0xFFC0)])
    def test_every_kind_of_nan(self, dtype: str, bits: int) -> None:
        spec = Spec({"w": Entry((1,), {"F16": torch.float16, "BF16": torch.bfloat16}[dtype])})
        with pytest.raises(WireError, match="not finite"):
            decode(body({"w": entry(dtype, [1], [0, 2])}, struct.pack("<H", bits)), spec)

    @pytest.mark.parametrize("bad", [MAX_ABSOLUTE / MAX_WEIGHT, -1e300, sys.float_info.max])
    def test_float64_too_large_to_be_averaged(self, bad: float) -> None:
        sent = {"w": torch.tensor([1.0, bad], dtype=torch.float64)}
        with pytest.raises(WireError, match="far too large"):
            decode(encode(sent), Spec.of(sent))

    @pytest.mark.parametrize("bad", [MAX_INTEGER + 1, -MAX_INTEGER - 1, 2**63 - 1, -(2**63)])
    def test_int64_out_of_range(self, bad: int) -> None:
        sent = {"steps": torch.tensor([0, bad])}
        with pytest.raises(WireError, match="'steps' holds a value out of range"):
            decode(encode(sent), Spec.of(sent))

    @pytest.mark.parametrize("byte", [2, 127, 255])
    def test_bool_that_is_neither_0_nor_1(self, byte: int) -> None:
        spec = Spec({"mask": Entry((3,), torch.bool)})
        data = body({"mask": entry("BOOL", [3], [0, 3])}, bytes([1, 0, byte]))
        with pytest.raises(WireError, match="'mask' holds a value out of range"):
            decode(data, spec)

    @pytest.mark.parametrize("found", [None, [], "text", 3, {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": {}}], ids=repr)
    def test_metadata_of_the_wrong_kind(self, found: Any) -> None:
        with pytest.raises(WireError, match="metadata is not a table of texts"):
            decode(body({"__metadata__": found, "w": entry()}, PAIR_DATA), PAIR)

    def test_oversized_metadata(self) -> None:
        largest = {"key": "é" * ((MAX_METADATA_BYTES - 4) // 2) + "x"}
        assert decode(encode({"w": torch.ones(2)}, largest), PAIR)[1] == largest
        with pytest.raises(WireError, match=f"more than {MAX_METADATA_BYTES} bytes"):
            decode(encode({"w": torch.ones(2)}, {"key": largest["key"] + "y"}), PAIR)

    @pytest.mark.parametrize("metadata", ['{"a":"\\ud800"}', '{"\\udfff":"a"}', '{"a":"\\udc00\\ud800"}'])
    def test_half_a_surrogate_pair_in_the_metadata(self, metadata: str) -> None:
        text = '{"__metadata__":%s,"w":%s}' % (metadata, json.dumps(entry()))  # noqa: UP031
        with pytest.raises(WireError, match="metadata is not proper Unicode"):
            decode(body(text.encode(), PAIR_DATA), PAIR)

    def test_half_a_surrogate_pair_in_a_name(self) -> None:
        text = '{"\\ud800":%s}' % json.dumps(entry())  # noqa: UP031
        with pytest.raises(WireError, match="unknown") as caught:
            decode(body(text.encode(), PAIR_DATA), PAIR)
        str(caught.value).encode()  # can be shown


def verdict(pieces: list[bytes], spec: Spec) -> dict[str, str] | str:
    """The metadata, or the error's message, of a body that comes in pieces."""
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
    """A valid body after a few accidents."""
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


# Pieces of JSON that Python and the library might read differently.
TOKENS = [
    *("0", "1", "2", "-0", "-1", "00", "01", "1.0", "1e0", "0e9", "0.0", "-0.0", "1e400", "true", "false", "null"),
    *("NaN", "Infinity", "-Infinity", "[]", "{}", '""', "[0]", "[[]]", "' '", '"\\u0041"', '"\\ud800"', '"\\/"'),
    *('"\\x"', "[0,]", "[,0]", "+1", "0x1", str(2**64), str(2**128)),
]


@st.composite
def damaged_headers(draw: st.DrawFn) -> bytes:
    """A valid body with some of the header's tokens exchanged and the header's length made right again."""
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
    def test_damage_is_refused_or_harmless(self, data: bytes) -> None:
        """Any other exception than a WireError fails; so does a body that the library cannot load after the checker."""
        try:
            received, metadata = decode(data, MIXED_SPEC)
        except WireError:
            return
        assert Spec.of(received) == MIXED_SPEC
        assert all(bool(tensor.isfinite().all()) for tensor in received.values())
        assert all(isinstance(text, str) for item in metadata.items() for text in item)

    @settings(max_examples=300)
    @given(st.binary(max_size=200))
    def test_noise_is_refused(self, data: bytes) -> None:
        with pytest.raises(WireError):
            decode(data, MIXED_SPEC)

    @settings(max_examples=300)
    @given(st.just(MIXED_BODY) | damaged() | damaged_headers(), st.lists(st.integers(0, 10_000), max_size=8))
    def test_pieces_do_not_matter(self, data: bytes, points: list[int]) -> None:
        whole, parts = verdict([data], MIXED_SPEC), verdict(cut(data, points), MIXED_SPEC)
        if isinstance(whole, str) and "bytes after its last tensor" in whole:
            # In pieces, a bad value may be met before the surplus shows, and the surplus before all of it is there.
            assert isinstance(parts, str)
        else:
            assert parts == whole

    @settings(max_examples=60)
    @given(tensor_sets, metadata_tables)
    def test_single_bytes(self, sent: dict[str, Tensor], metadata: dict[str, str]) -> None:
        data = encode(sent, metadata)
        assert verdict([bytes([byte]) for byte in data], Spec.of(sent)) == metadata

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_a_bad_value_cut_anywhere_is_seen(self, dtype: torch.dtype) -> None:
        sent = {"w": torch.tensor([1.0, float("nan"), 1.0], dtype=dtype)}
        data = encode(sent)
        start = len(data) - 3 * dtype.itemsize
        for first in range(start, len(data) + 1):
            for second in range(first, len(data) + 1):
                found = verdict([data[:first], data[first:second], data[second:]], Spec.of(sent))
                assert isinstance(found, str)
                assert "not finite" in found

    def test_a_good_value_cut_anywhere_is_not_misread(self) -> None:
        """Bytes 7F 80 next to each other make an infinity only where an element begins."""
        sent = {"w": torch.tensor([0x807F, 0x807F, 0x0080], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)}
        data = encode(sent)
        for first in range(len(data) + 1):
            for second in range(first, len(data) + 1):
                assert verdict([data[:first], data[first:second], data[second:]], Spec.of(sent)) == {}

    def test_views_are_taken_as_they_are(self) -> None:
        checker = Checker(MIXED_SPEC)
        view = memoryview(MIXED_BODY)
        checker.feed(view[:100])
        checker.feed(view[100:])
        assert checker.finish() == {"round": "3"}


class TestMemory:
    def test_a_claimed_header_is_refused_before_it_comes(self) -> None:
        checker = Checker(PAIR)
        checker.feed(bytes(5))
        with pytest.raises(WireError, match=f"claims {2**40} bytes"):
            checker.feed((2**40).to_bytes(8, "little")[5:])

    def test_surplus_is_refused_before_it_is_looked_at(self) -> None:
        checker = Checker(PAIR)
        checker.feed(body({"w": entry()}))
        with pytest.raises(WireError, match="bytes after its last tensor"):
            checker.feed(bytes(9))

    @pytest.mark.parametrize("piece_bytes", [64 * 1024, 64 * 1024 + 1])
    def test_a_large_body_is_not_held(self, piece_bytes: int) -> None:
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

    def test_a_large_header_without_an_end_is_not_held(self) -> None:
        """A stranger who sends more and more can make the checker hold no more than the longest header."""
        checker = Checker(PAIR)
        tracemalloc.start()
        try:
            checker.feed(PAIR.max_header_bytes.to_bytes(8, "little") + b"{")
            with pytest.raises(WireError, match="not JSON"):
                feed_all(checker, itertools.repeat(b" " * 64 * 1024, 1000))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 * PAIR.max_header_bytes


class TestSeveralForms:
    """A body that may hold one set of tensors or another."""

    ONE, TWO = PAIR, Spec({"w": Entry((3,), torch.float32), "x": Entry((1,), torch.int64)})

    @pytest.mark.parametrize(
        "tensors",
        [{"w": torch.zeros(2)}, {"w": torch.zeros(3), "x": torch.ones(1, dtype=torch.int64)}],
    )
    def test_each_form_is_taken(self, tensors: dict[str, torch.Tensor]) -> None:
        checker = Checker(self.ONE, self.TWO)
        checker.feed(encode(tensors))
        checker.finish()

    @pytest.mark.parametrize(
        "tensors",
        [
            {"w": torch.zeros(3)},
            {"w": torch.zeros(2), "x": torch.zeros(1, dtype=torch.int64)},
            {"w": torch.zeros(3), "x": torch.zeros(1)},
            {"w": torch.zeros(3), "x": torch.full((1,), 2**60)},
            {},
        ],
    )
    def test_nothing_else_is(self, tensors: dict[str, torch.Tensor]) -> None:
        with pytest.raises(WireError):
            Checker(self.ONE, self.TWO).feed(encode(tensors))
