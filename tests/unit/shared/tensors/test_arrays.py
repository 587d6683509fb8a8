import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_bodies import tensor_sets
from support.tensors import assert_same_tensors
from torch import Tensor

from shared.tensors.arrays import as_arrays, as_tensor, as_tensors, empty, rounded
from shared.tensors.spec import Entry, Spec

NARROW = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@given(tensor_sets)
def test_tensors_survive_as_arrays(tensors: dict[str, Tensor]) -> None:
    assert Spec.of(as_arrays(tensors)) == Spec.of(tensors)
    assert_same_tensors(as_tensors(as_arrays(tensors)), tensors)


@given(st.lists(st.floats(-6e4, 6e4) | st.floats(-1e-6, 1e-6), min_size=1), st.sampled_from(sorted(NARROW)))
def test_float64_is_rounded_as_torch_rounds_it(values: list[float], name: str) -> None:
    wide = torch.tensor(values, dtype=torch.float64)
    wire_name = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[name]
    found = as_tensor(rounded(wide.numpy(), Entry((), wire_name).dtype))
    assert_same_tensors({"w": found}, {"w": wide.to(NARROW[name])})


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)], ids=str)
def test_new_arrays_are_shared_with_torch(shape: tuple[int, ...]) -> None:
    array = empty(shape, np.dtype(np.float32))
    array[...] = 1
    tensor = as_tensor(array)
    array[...] = 2
    assert tensor.shape == shape
    assert bool((tensor == 2).all())


def test_read_only_arrays_are_copied() -> None:
    array = np.frombuffer(bytes(8), np.float32)
    tensor = as_tensor(array)
    tensor += 1
    assert array.tolist() == [0, 0]
