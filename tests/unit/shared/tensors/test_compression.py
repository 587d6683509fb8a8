from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.compression import OPTIONS

from shared.contract.errors import WireError
from shared.contract.plan import UpdateCompression
from shared.tensors.arrays import Array, Arrays
from shared.tensors.compression import compress, compressed_spec, restore
from shared.tensors.names import SHARED, add_prefix
from shared.tensors.spec import Spec
from shared.tensors.wire import decode, encode

every_option = pytest.mark.parametrize("option", OPTIONS)
# The largest error of a value, relative to the largest one in its block.
ERRORS: dict[UpdateCompression, float] = {"bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
BLOCKS: dict[UpdateCompression, int] = {"bf16": 1, "int8": 256, "int4": 64}
LARGEST = float(np.finfo(np.float32).max)
SHAPES = hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=9)


def tensors_of(shape: tuple[int, ...], largest: float) -> st.SearchStrategy[Array]:
    largest = float(np.float32(largest))
    return hnp.arrays(np.float32, shape, elements=st.floats(-largest, largest, width=32))


@st.composite
def pairs(draw: st.DrawFn, largest: float = LARGEST / 4) -> tuple[Array, Array]:
    """Return a trained tensor and the one that the round started from."""
    shape = draw(SHAPES)
    return draw(tensors_of(shape, largest)), draw(tensors_of(shape, largest))


def sent_and_restored(trained: Array, base: Array, option: UpdateCompression) -> tuple[Arrays, Array, Array]:
    """Return what is uploaded, what the coordinator reads, and the residual."""
    sent, residual = compress({"w": trained}, {"w": base}, {}, option)
    return sent, restore(sent, {"w": base}, option)["w"], residual["w"]


def test_every_option_is_tested() -> None:
    assert {"none", *OPTIONS} == set(get_args(UpdateCompression))


@every_option
@given(pair=pairs())
def test_an_upload_has_the_announced_form_and_survives_the_wire(
    option: UpdateCompression, pair: tuple[Array, Array]
) -> None:
    trained, base = pair
    sent, restored, _ = sent_and_restored(trained, base, option)
    spec = compressed_spec(Spec.of({"w": trained}).prefixed(SHARED), option)
    body = encode(add_prefix(sent, SHARED))
    received, _ = decode(body, spec)
    assert len(body) <= spec.max_total_bytes
    assert Spec.of(received).entries == spec.entries
    assert restored.shape == trained.shape
    assert restored.dtype == np.float32


@every_option
@given(pair=pairs(), data=st.data())
def test_the_error_is_at_most_half_a_step_of_the_block(
    option: UpdateCompression, pair: tuple[Array, Array], data: st.DataObject
) -> None:
    scale = np.float32(data.draw(st.sampled_from([1, 1e-3, 1e-20, 1e-30])))
    trained, base = pair[0] * scale, pair[1] * scale
    _, restored, _ = sent_and_restored(trained, base, option)
    delta = (trained - base).astype(np.float64).reshape(-1)
    error = np.abs(restored.astype(np.float64) - trained).reshape(-1)
    for begin in range(0, delta.size, BLOCKS[option]):
        block = slice(begin, begin + BLOCKS[option])
        step = np.abs(delta[block]).max() * ERRORS[option]
        rounding = 2**-22 * (np.abs(delta[block]).max() + np.abs(trained.reshape(-1)[block]).max())
        assert error[block].max() <= step * 1.000001 + rounding + 1e-35


@every_option
@given(pair=pairs())
def test_what_arrives_and_what_is_left_out_add_up_to_what_was_trained(
    option: UpdateCompression, pair: tuple[Array, Array]
) -> None:
    trained, base = pair
    _, restored, residual = sent_and_restored(trained, base, option)
    error = np.abs(restored.astype(np.float64) + residual - trained)
    assert (error <= 2**-23 * np.maximum(np.abs(restored), np.abs(trained)) + 1e-45).all()


@every_option
@given(tensor=SHAPES.flatmap(lambda shape: tensors_of(shape, LARGEST)))
def test_an_unchanged_tensor_stays_the_same_to_the_bit(option: UpdateCompression, tensor: Array) -> None:
    _, restored, residual = sent_and_restored(tensor, tensor, option)
    assert np.array_equal(restored, tensor)
    assert not residual.any()


@every_option
@pytest.mark.parametrize("value", [1e-45, 1e-40, 1.2e-38, 1e-36, 1.0, 1e30, LARGEST])
def test_extreme_values_are_sent_or_kept_in_full(option: UpdateCompression, value: float) -> None:
    trained = np.array([[value, -value, 0.0]], np.float32)
    _, restored, residual = sent_and_restored(trained, np.zeros_like(trained), option)
    assert np.isfinite(restored).all()
    assert np.allclose(restored.astype(np.float64) + residual, trained, rtol=1e-6, atol=0)
    if value >= 1e-36:
        assert np.allclose(restored, trained, rtol=2**-7)


@every_option
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 255, 256, 257, 513])
def test_blocks_need_not_be_full(option: UpdateCompression, size: int) -> None:
    trained = np.linspace(-1, 1, size, dtype=np.float32).reshape(1, size)
    _, restored, _ = sent_and_restored(trained, np.zeros_like(trained), option)
    assert np.abs(restored - trained).max() <= ERRORS[option] * 1.001


def test_integers_are_rounded_to_nearest_and_packed_low_half_first() -> None:
    trained = np.array([[7.0, -7.0, 2.4, -3.6, 1.0]], np.float32)
    base = np.zeros_like(trained)
    sent, restored, residual = sent_and_restored(trained, base, "int4")
    assert sent["w"].tolist() == [0x97, 0xC2, 0x01]
    assert sent["w.scales"].tolist() == [1.0]
    assert restored.tolist() == [[7.0, -7.0, 2.0, -4.0, 1.0]]
    assert np.allclose(residual, [[0, 0, 0.4, 0.4, 0]])
    sent, _, _ = sent_and_restored(trained * np.float32(127 / 7), base, "int8")
    assert sent["w"].tolist() == [[127, -127, 44, -65, 18]]


@every_option
def test_vectors_and_other_dtypes_are_sent_as_they_are(option: UpdateCompression) -> None:
    """A rounded running variance could fall below zero."""
    base: Arrays = {
        "norm.running_var": np.ones(3, np.float32),
        "norm.num_batches_tracked": np.array(4),
        "wide": np.ones((2, 2), np.float64),
    }
    trained = {name: value * 3 for name, value in base.items()}
    sent, residual = compress(trained, base, {}, option)
    assert not residual
    assert {name: value.tolist() for name, value in restore(sent, base, option).items()} == {
        name: value.tolist() for name, value in trained.items()
    }
    spec = Spec.of(base).prefixed(SHARED)
    assert compressed_spec(spec, option).entries == spec.entries


def test_personal_tensors_are_not_compressed() -> None:
    spec = Spec.of({"personal.offset": np.ones((3, 4, 4), np.float32)})
    assert compressed_spec(spec, "int8").entries == spec.entries


def test_without_compression_nothing_changes() -> None:
    tensors: Arrays = {"w": np.ones((2, 2), np.float32)}
    spec = Spec.of(tensors).prefixed(SHARED)
    assert compressed_spec(spec, "none").entries == spec.entries
    sent, residual = compress(tensors, {}, {}, "none")
    assert (sent["w"] is tensors["w"], residual) == (True, {})
    assert restore(sent, {}, "none")["w"] is tensors["w"]


@every_option
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_diverged_tensor_is_named(option: UpdateCompression, value: float) -> None:
    trained = {"w": np.array([[1.0, value]], np.float32)}
    with pytest.raises(WireError, match="'w' contains a value that is not finite") as caught:
        compress(trained, {"w": np.zeros((1, 2), np.float32)}, {}, option)
    assert "lower the learning rate" in str(caught.value.next_step)


@every_option
def test_a_residual_of_another_shape_is_ignored(option: UpdateCompression) -> None:
    trained, base = {"w": np.ones((2, 3), np.float32)}, {"w": np.zeros((2, 3), np.float32)}
    sent, _ = compress(trained, base, {"w": np.ones((3, 2), np.float32)}, option)
    expected, _ = compress(trained, base, {}, option)
    assert all(np.array_equal(sent[name], expected[name]) for name in expected)


@every_option
def test_what_rounding_leaves_out_arrives_in_later_rounds(option: UpdateCompression) -> None:
    """Every round wants a step that is lost without the residual; over many rounds, all of it arrives."""
    step = np.full((1, 64), 1e-4, np.float32)
    step[0, 0] = 1.0  # sets the scale of the block
    base, residual = np.zeros_like(step), Arrays()
    for _ in range(200):
        sent, residual = compress({"w": base + step}, {"w": base}, residual, option)
        base = restore(sent, {"w": base}, option)["w"]
        assert np.abs(residual["w"]).max() <= ERRORS[option] * 1.01
    assert np.abs(base - 200 * step).max() <= ERRORS[option] * 1.1


@given(
    values=hnp.arrays(np.int8, (2, 300)),
    scales=hnp.arrays(np.float32, 3, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    start=st.sampled_from([0.0, LARGEST, -LARGEST, 1e-45]),
)
def test_any_upload_that_a_checker_accepts_gives_finite_tensors(values: Array, scales: Array, start: float) -> None:
    base = {"w": np.full((2, 300), start, np.float32)}
    restored = restore({"w": values, "w.scales": scales}, base, "int8")["w"]
    assert np.isfinite(restored).all()
    packed = {"w": values.reshape(-1)[:300].view(np.uint8), "w.scales": np.resize(scales, 10)}
    assert np.isfinite(restore(packed, base, "int4")["w"]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(value: float) -> None:
    spec = compressed_spec(Spec.of({"shared.w": np.ones((2, 2), np.float32)}), "int8")
    upload: Arrays = {"shared.w": np.ones((2, 2), np.int8), "shared.w.scales": np.array([value], np.float32)}
    with pytest.raises(WireError, match=r"'shared\.w\.scales' contains a value that is not finite"):
        decode(encode(upload), spec)
