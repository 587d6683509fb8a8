import torch
from hypothesis import given
from support.tensor_bodies import (
    MIXED_SPEC,
    PAIR,
    metadata_tables,
    tensor_sets,
)
from torch import Tensor

from shared.tensors.spec import Entry, Spec
from shared.tensors.wire import encode


def test_spec_can_be_taken_from_meta_tensors() -> None:
    with torch.device("meta"):
        spec = Spec.of(torch.nn.Linear(3, 2).state_dict())
    assert spec.entries == {
        "weight": Entry((2, 3), "F32"),
        "bias": Entry((2,), "F32"),
    }


def test_data_bytes_add_up_over_all_dtypes() -> None:
    assert MIXED_SPEC.data_bytes == 6 * 4 + 8 + 2 * 2 + 2 + 3


def test_prefixed_specs_can_be_merged() -> None:
    both = PAIR.prefixed("shared.") | PAIR.prefixed("personal.")
    assert both.entries.keys() == {"shared.w", "personal.w"}
    assert both.data_bytes == 16


@given(tensor_sets, metadata_tables)
def test_no_valid_body_exceeds_the_spec_s_limit(sent: dict[str, Tensor], metadata: dict[str, str]) -> None:
    assert len(encode(sent, metadata)) <= Spec.of(sent).max_total_bytes
