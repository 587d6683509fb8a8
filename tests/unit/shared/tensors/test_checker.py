import json
import struct
import sys
from typing import Any

import pytest
import torch
from support.tensor_bodies import (
    FLOATS,
    MIXED_BODY,
    MIXED_SPEC,
    PAIR,
    PAIR_DATA,
    body,
    check,
    entry,
)

from shared.contract.errors import WireError
from shared.contract.limits import MAX_ABSOLUTE, MAX_INTEGER, MAX_WEIGHT
from shared.tensors.checker import Checker
from shared.tensors.spec import MAX_METADATA_BYTES, Entry, Spec
from shared.tensors.wire import decode, encode


class TestLength:
    def test_every_truncation_is_rejected(self) -> None:
        for length in range(len(MIXED_BODY)):
            with pytest.raises(WireError, match=r"ends inside its header|ends \d+ bytes too early") as caught:
                decode(MIXED_BODY[:length], MIXED_SPEC)
            assert caught.value.next_step == "Send it again in full."

    def test_truncation_error_says_how_much_is_missing(self) -> None:
        with pytest.raises(WireError, match="ends 5 bytes too early"):
            decode(MIXED_BODY[:-5], MIXED_SPEC)

    @pytest.mark.parametrize("extra", [1, 8, 1000])
    def test_trailing_bytes_are_rejected(self, extra: int) -> None:
        with pytest.raises(WireError, match=f"at least {extra} bytes after its last tensor"):
            decode(MIXED_BODY + bytes(extra), MIXED_SPEC)

    def test_trailing_bytes_after_a_body_without_data_are_rejected(self) -> None:
        with pytest.raises(WireError, match="at least 1 bytes after"):
            decode(encode({}) + b"\0", Spec({}))


class TestEntries:
    def test_missing_tensor_is_rejected(self) -> None:
        with pytest.raises(WireError, match=r"expected tensors; missing: 'w'\.") as caught:
            decode(encode({}), PAIR)
        assert caught.value.next_step is not None
        assert "for this plan" in caught.value.next_step

    def test_unexpected_tensor_is_rejected(self) -> None:
        with pytest.raises(WireError, match=r"expected tensors; unexpected: 'extra'\."):
            decode(encode({"w": torch.ones(2), "extra": torch.ones(1)}), PAIR)

    def test_renamed_tensor_is_rejected(self) -> None:
        with pytest.raises(WireError, match=r"missing: 'w'; unexpected: 'W'\."):
            decode(encode({"W": torch.ones(2)}), PAIR)

    def test_message_shortens_long_lists_of_unexpected_names(self) -> None:
        sent = {f"{number}{'x' * 500}": torch.ones(1) for number in range(50)}
        with pytest.raises(WireError, match=r"unexpected: .* and 47 more") as caught:
            decode(encode(sent), PAIR)
        assert len(str(caught.value)) < 600

    @pytest.mark.parametrize("found", ["F16", "BF16", "I32", "U32", "f32", "", None, 32, ["F32"], {}])
    def test_wrong_dtype_is_rejected(self, found: Any) -> None:
        with pytest.raises(WireError, match=r"'w' has dtype .* expected 'F32'"):
            decode(body({"w": entry(dtype=found)}, PAIR_DATA), PAIR)

    @pytest.mark.parametrize(
        "found", [[], [1], [3], [2, 1], [1, 2], [-2], "2", 2, None, {}, [[2]], ["2"], [2.0], [None], [2**70]]
    )
    def test_wrong_shape_is_rejected(self, found: Any) -> None:
        with pytest.raises(WireError, match=r"'w' has shape .* expected \[2\]"):
            decode(body({"w": entry(shape=found)}, PAIR_DATA), PAIR)

    @pytest.mark.parametrize("found", ["true", "1.0", "1e0", '"1"'])
    def test_shape_that_equals_one_only_in_python_is_rejected(self, found: str) -> None:
        text = '{"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}' % found  # noqa: UP031 - braces abound
        with pytest.raises(WireError, match="'w' has shape"):
            decode(body(text.encode(), bytes(4)), Spec({"w": Entry((1,), "F32")}))

    @pytest.mark.parametrize("found", ["false,1", "0,true", "0.0,1", "0,1.0", "0,1e0", "-0,1"])
    def test_offsets_that_equal_zero_and_one_only_in_python_are_rejected(self, found: str) -> None:
        text = '{"w":{"dtype":"U8","shape":[],"data_offsets":[%s]}}' % found  # noqa: UP031
        with pytest.raises(WireError, match="does not span the 1 bytes"):
            decode(body(text.encode(), bytes(1)), Spec({"w": Entry((), "U8")}))

    def test_minus_zero_is_not_a_size(self) -> None:
        """safetensors reads -0 as a floating-point number and rejects it."""
        text = b'{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'
        with pytest.raises(WireError, match="'w' has shape"):
            decode(body(text), Spec({"w": Entry((0,), "F32")}))

    @pytest.mark.parametrize(
        "found",
        [[0, 4], [0, 16], [8, 0], [0], [], [0, 8, 8], [0, 4, 8], "08", None, {"0": 8}, [-8, 0], [0, None], 8],
    )
    def test_offsets_that_do_not_span_the_shape_are_rejected(self, found: Any) -> None:
        with pytest.raises(WireError, match="'w' does not span the 8 bytes of its shape"):
            decode(body({"w": entry(offsets=found)}, PAIR_DATA), PAIR)

    @pytest.mark.parametrize(
        ("second", "at"),
        [([4, 12], "byte 4 of the data, not at 8"), ([0, 8], "byte 0 of the data, not at 8"), ([12, 20], "byte 12")],
        ids=["overlap", "same place", "gap"],
    )
    def test_overlaps_and_gaps_are_rejected(self, second: list[int], at: str) -> None:
        spec = PAIR | Spec({"x": Entry((2,), "F32")})
        data = body({"w": entry(), "x": entry(offsets=second)}, bytes(16))
        with pytest.raises(WireError, match=f"starts at {at}"):
            decode(data, spec)

    @pytest.mark.parametrize("start", [1, 8, 2**63, 10**30])
    def test_gap_before_the_first_tensor_is_rejected(self, start: int) -> None:
        with pytest.raises(WireError, match=f"starts at byte {start} of the data, not at 0"):
            decode(body({"w": entry(offsets=[start, start + 8])}, bytes(8)), PAIR)

    def test_empty_tensor_inside_another_is_rejected(self) -> None:
        spec = PAIR | Spec({"x": Entry((0,), "F32")})
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
    def test_repeated_keys_are_rejected(self, text: str) -> None:
        text = text.replace("ENTRY", json.dumps(entry()))
        with pytest.raises(WireError, match="not valid JSON with unique keys"):
            decode(body(text.encode(), PAIR_DATA), PAIR)

    @pytest.mark.parametrize(
        "found", [None, [], "F32", 3, {}, {"dtype": "F32", "shape": [2]}, {**entry(), "more": 1}], ids=repr
    )
    def test_malformed_entry_is_rejected(self, found: Any) -> None:
        with pytest.raises(WireError, match="entry for tensor 'w' is malformed"):
            decode(body({"w": found}, PAIR_DATA), PAIR)


class TestHeader:
    @pytest.mark.parametrize("length", [0, 1, 2**31, 2**40, 2**60, 2**64 - 1])
    def test_header_length_out_of_bounds_is_rejected(self, length: int) -> None:
        with pytest.raises(WireError, match=f"The header claims {length} bytes; at most"):
            decode(body({"w": entry()}, PAIR_DATA, length=length), PAIR)

    def test_header_length_limit_is_exact(self) -> None:
        limit = PAIR.max_header_bytes
        text = json.dumps({"w": entry()}).encode()
        assert check(body(text.ljust(limit), PAIR_DATA), PAIR) == {}
        with pytest.raises(WireError, match=f"claims {limit + 1} bytes; at most {limit} are allowed"):
            decode(body(text.ljust(limit + 1), PAIR_DATA), PAIR)

    def test_header_longer_than_the_body_is_rejected(self) -> None:
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
    def test_header_must_be_json(self, text: bytes) -> None:
        with pytest.raises(WireError, match="not valid JSON with unique keys"):
            decode(body(text, PAIR_DATA), PAIR)

    @pytest.mark.parametrize("text", [b"[]", b'"w"', b"12", b"null", b"NaN", b"true", b'["w"]'], ids=repr)
    def test_header_must_be_an_object(self, text: bytes) -> None:
        with pytest.raises(WireError, match="not a JSON object"):
            decode(body(text, PAIR_DATA), PAIR)

    @pytest.mark.parametrize("lead", [b" ", b"\n", b"\t"])
    def test_header_must_not_start_with_white_space(self, lead: bytes) -> None:
        """The safetensors format requires the brace first."""
        with pytest.raises(WireError, match="not a JSON object"):
            decode(body(lead + json.dumps({"w": entry()}).encode(), PAIR_DATA), PAIR)

    @pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", None])
    def test_nesting_close_to_python_s_limit_is_rejected(self, field: str | None) -> None:
        """The error message must be able to show anything the JSON parser can read."""
        limit = sys.getrecursionlimit()
        for depth in range(limit - 200, limit + 20):
            nested = "[" * depth + "]" * depth
            text = json.dumps({"w": entry() | {field: "HERE"} if field else "HERE"}).replace('"HERE"', nested)
            with pytest.raises(WireError):
                check(body(text.encode(), PAIR_DATA), PAIR)


class TestValues:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("at", [0, 3, 6])
    def test_values_must_be_finite(self, dtype: torch.dtype, bad: float, at: int) -> None:
        sent = {"w": torch.ones(7, dtype=dtype)}
        sent["w"][at] = bad
        with pytest.raises(WireError, match="'w' contains a value that is not finite or far too large") as caught:
            decode(encode(sent), Spec.of(sent))
        assert caught.value.next_step is not None
        assert "learning rate" in caught.value.next_step

    @pytest.mark.parametrize(("dtype", "bits"), [("F16", 0x7C01), ("F16", 0xFE00), ("BF16", 0x7F81), ("BF16", 0xFFC0)])
    def test_every_kind_of_nan_is_rejected(self, dtype: str, bits: int) -> None:
        spec = Spec({"w": Entry((1,), dtype)})
        with pytest.raises(WireError, match="not finite"):
            decode(body({"w": entry(dtype, [1], [0, 2])}, struct.pack("<H", bits)), spec)

    @pytest.mark.parametrize("bad", [MAX_ABSOLUTE / MAX_WEIGHT, -1e300, sys.float_info.max])
    def test_float64_too_large_to_average_is_rejected(self, bad: float) -> None:
        sent = {"w": torch.tensor([1.0, bad], dtype=torch.float64)}
        with pytest.raises(WireError, match="far too large"):
            decode(encode(sent), Spec.of(sent))

    @pytest.mark.parametrize("bad", [MAX_INTEGER + 1, -MAX_INTEGER - 1, 2**63 - 1, -(2**63)])
    def test_int64_out_of_range_is_rejected(self, bad: int) -> None:
        sent = {"steps": torch.tensor([0, bad])}
        with pytest.raises(WireError, match="'steps' contains a value out of range"):
            decode(encode(sent), Spec.of(sent))

    @pytest.mark.parametrize("byte", [2, 127, 255])
    def test_bool_must_be_0_or_1(self, byte: int) -> None:
        spec = Spec({"mask": Entry((3,), "BOOL")})
        data = body({"mask": entry("BOOL", [3], [0, 3])}, bytes([1, 0, byte]))
        with pytest.raises(WireError, match="'mask' contains a value out of range"):
            decode(data, spec)


class TestMetadata:
    @pytest.mark.parametrize("found", [None, [], "text", 3, {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": {}}], ids=repr)
    def test_metadata_must_be_strings(self, found: Any) -> None:
        with pytest.raises(WireError, match="metadata is not a table of strings"):
            decode(body({"__metadata__": found, "w": entry()}, PAIR_DATA), PAIR)

    def test_metadata_size_is_limited(self) -> None:
        largest = {"key": "é" * ((MAX_METADATA_BYTES - 4) // 2) + "x"}
        assert decode(encode({"w": torch.ones(2)}, largest), PAIR)[1] == largest
        with pytest.raises(WireError, match=f"more than {MAX_METADATA_BYTES} bytes"):
            decode(encode({"w": torch.ones(2)}, {"key": largest["key"] + "y"}), PAIR)

    @pytest.mark.parametrize("metadata", ['{"a":"\\ud800"}', '{"\\udfff":"a"}', '{"a":"\\udc00\\ud800"}'])
    def test_lone_surrogate_in_the_metadata_is_rejected(self, metadata: str) -> None:
        text = '{"__metadata__":%s,"w":%s}' % (metadata, json.dumps(entry()))  # noqa: UP031
        with pytest.raises(WireError, match="metadata is not valid Unicode"):
            decode(body(text.encode(), PAIR_DATA), PAIR)

    def test_lone_surrogate_in_a_name_is_rejected(self) -> None:
        text = '{"\\ud800":%s}' % json.dumps(entry())  # noqa: UP031
        with pytest.raises(WireError, match="unexpected: ") as caught:
            decode(body(text.encode(), PAIR_DATA), PAIR)
        str(caught.value).encode()  # can be displayed


class TestSeveralForms:
    """A body that may match one of two specs."""

    ONE, TWO = PAIR, Spec({"w": Entry((3,), "F32"), "x": Entry((1,), "I64")})

    @pytest.mark.parametrize(
        "tensors",
        [{"w": torch.zeros(2)}, {"w": torch.zeros(3), "x": torch.ones(1, dtype=torch.int64)}],
    )
    def test_each_form_is_accepted(self, tensors: dict[str, torch.Tensor]) -> None:
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
    def test_other_forms_are_rejected(self, tensors: dict[str, torch.Tensor]) -> None:
        with pytest.raises(WireError):
            Checker(self.ONE, self.TWO).feed(encode(tensors))
