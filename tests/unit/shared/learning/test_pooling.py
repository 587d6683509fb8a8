"""Max pooling through oneDNN: the same as torch's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shared.learning.pooling import MaxPool

SIZES = [(2, 2, 0), (3, 2, 0), (3, 2, 1), (2, 1, 0)]


def gradient(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's output, and the gradient of a sum in which every output has another weight."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.arange(1.0, y.numel() + 1).reshape(y.shape))
    assert x.grad is not None
    return y.detach(), x.grad


@given(
    size=st.sampled_from(SIZES),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(3, 13), st.integers(3, 13)),
    levels=st.integers(1, 1000),  # with few levels, many windows have several maxima: the first one counts
)
def test_maxima_and_gradients_are_torch_s(
    size: tuple[int, int, int], shape: tuple[int, int, int, int], levels: int
) -> None:
    x = torch.randint(levels, shape).float() - levels / 2
    ours, theirs = gradient(MaxPool(*size), x), gradient(nn.MaxPool2d(*size), x)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])  # the weights are whole numbers, so that sums are exact


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 8, 8, dtype=torch.float64),
        torch.randn(2, 3, 8, 8).bfloat16(),
        torch.randn(2, 3, 8, 16)[..., ::2],
    ],
    ids=["channels last", "float64", "bfloat16", "strided"],
)
def test_other_tensors_are_pooled_by_torch(x: Tensor) -> None:
    assert torch.equal(MaxPool(2)(x), nn.MaxPool2d(2)(x))


def test_settings_are_copied() -> None:
    for layer in (nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d((2, 3), (1, 2), (1, 0))):
        x = torch.randn(2, 3, 9, 9)
        assert torch.equal(MaxPool.in_place_of(layer)(x), layer(x))


def test_an_exported_program_has_torch_s_pooling() -> None:
    program = torch.export.export(MaxPool(2).eval(), (torch.randn(2, 3, 8, 8),))
    assert "mkldnn" not in str(program.graph)
