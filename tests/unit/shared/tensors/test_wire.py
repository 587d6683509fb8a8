import base64
import hashlib
import json
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_bodies import FLOATS, INTEGERS, body, entry, metadata_tables, tensor_sets
from support.tensors import assert_same_tensors
from torch import Tensor

from shared.contract.limits import MAX_ABSOLUTE, MAX_INTEGER, MAX_WEIGHT
from shared.tensors.spec import Entry, Spec
from shared.tensors.wire import decode, digest, digest_header, encode


def layout_and_data(body: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(body[:8], "little")
    return json.loads(body[8:end]), body[end:]


class TestRoundTrip:
    @given(tensor_sets, metadata_tables)
    def test_decoding_reverses_encoding(self, sent: dict[str, Tensor], metadata: dict[str, str]) -> None:
        received, received_metadata = decode(encode(sent, metadata), Spec.of(sent))
        assert_same_tensors(received, sent)
        assert received_metadata == metadata

    @given(tensor_sets, metadata_tables)
    def test_safetensors_reads_encoded_bodies(self, sent: dict[str, Tensor], metadata: dict[str, str]) -> None:
        assert_same_tensors(safetensors.torch.load(encode(sent, metadata)), sent)

    @given(tensor_sets)
    def test_tensors_are_in_the_library_s_order(self, sent: dict[str, Tensor]) -> None:
        """Digests depend on it: models that earlier releases wrote with the library have the same bytes."""
        assert layout_and_data(encode(sent)) == layout_and_data(safetensors.torch.save(sent))

    @given(tensor_sets, metadata_tables)
    def test_bodies_written_by_safetensors_are_decoded(self, sent: dict[str, Tensor], metadata: dict[str, str]) -> None:
        received, received_metadata = decode(safetensors.torch.save(sent, metadata or None), Spec.of(sent))
        assert_same_tensors(received, sent)
        assert received_metadata == metadata

    @given(tensor_sets, metadata_tables, st.randoms(use_true_random=False))
    def test_encoding_does_not_depend_on_the_order_of_tables(
        self, sent: dict[str, Tensor], metadata: dict[str, str], random: Any
    ) -> None:
        def shuffled(table: dict[str, Any]) -> dict[str, Any]:
            return dict(random.sample(sorted(table.items()), len(table)))

        assert encode(shuffled(sent), shuffled(metadata)) == encode(sent, metadata)

    def test_strided_and_trained_tensors_are_encoded_by_value(self) -> None:
        parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        received, _ = decode(encode({"w": parameter.t()}), Spec({"w": Entry((3, 2), "F32")}))
        assert received["w"].tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_body_without_tensors_is_valid(self) -> None:
        assert decode(encode({}), Spec({})) == ({}, {})

    def test_data_may_be_in_a_different_order_than_the_header(self) -> None:
        spec = Spec({"a": Entry((1,), "F32"), "b": Entry((1,), "F32")})
        header = {"a": entry(shape=[1], offsets=[4, 8]), "b": entry(shape=[1], offsets=[0, 4])}
        received, _ = decode(body(header, struct.pack("<2f", 7, 9)), spec)
        assert (received["b"].item(), received["a"].item()) == (7, 9)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_extreme_values_of_a_float_dtype_are_accepted(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        limit = min(info.max, MAX_ABSOLUTE / MAX_WEIGHT / 2)
        sent = {"w": torch.tensor([limit, -limit, info.tiny, info.smallest_normal / 2, 0.0, -0.0], dtype=dtype)}
        assert_same_tensors(decode(encode(sent), Spec.of(sent))[0], sent)

    @pytest.mark.parametrize("dtype", INTEGERS, ids=str)
    def test_extreme_values_of_an_integer_dtype_are_accepted(self, dtype: torch.dtype) -> None:
        info = torch.iinfo(dtype)
        sent = {"w": torch.tensor([max(info.min, -MAX_INTEGER), min(info.max, MAX_INTEGER)], dtype=dtype)}
        assert_same_tensors(decode(encode(sent), Spec.of(sent))[0], sent)


class TestDigest:
    def test_digest_is_sha256_in_hex(self) -> None:
        assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

    def test_header_is_a_structured_field_byte_sequence(self) -> None:
        assert digest_header(digest(b"")) == "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"

    @given(st.binary(max_size=50))
    def test_header_holds_the_same_digest(self, data: bytes) -> None:
        algorithm, _, value = digest_header(digest(data)).partition("=")
        assert algorithm == "sha-256"
        assert base64.b64decode(value.strip(":")) == hashlib.sha256(data).digest()
