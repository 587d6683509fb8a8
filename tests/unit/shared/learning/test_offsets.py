from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.halves import server_half
from torch import Tensor

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan, ImagePlan, validate_plan
from shared.contract.seeds import derive_seed
from shared.learning.offsets import initial_offset, relative_motion
from shared.learning.preprocessing import normalize
from shared.tensors.arrays import as_tensor


def plan_with(seed: int = 0, channels: int = 3, **method: Any) -> FederationPlan:
    return validate_plan(
        {
            "name": "offsets",
            "preset": "paper",
            "classes": ["a", "b"],
            "seed": seed,
            "image": {"channels": channels, "height": 64, "width": 48, "mean": [0.4], "std": [0.2]},
            "method": method,
        }
    )


def offset_of(client: str, plan: FederationPlan) -> Tensor:
    assert isinstance(plan.method, DistransOptions)
    return as_tensor(initial_offset(plan, plan.method, client))


INITS = ["auto", "uniform", "imagenet", "normal", "zeros", "generator"]


@pytest.mark.parametrize("init", INITS)
def test_initial_offset_has_the_shape_of_one_image(init: str) -> None:
    offset = offset_of("a", plan_with(offset_init=init))
    assert (offset.shape, offset.dtype) == ((3, 64, 48), torch.float32)


@pytest.mark.parametrize(
    ("shape", "size_bytes"), [((3, 64, 64), 49_152), ((3, 128, 128), 196_608), ((1, 256, 256), 262_144)]
)
def test_offset_takes_four_bytes_per_pixel_in_memory_and_on_the_wire(
    shape: tuple[int, int, int], size_bytes: int
) -> None:
    channels, height, width = shape
    plan = plan_with().model_copy(update={"image": ImagePlan(channels=channels, height=height, width=width)})
    uploaded = server_half(plan).update_spec({"offset_aggregation": "mean"}).entries["personal.offset"]
    assert uploaded.size_bytes == offset_of("a", plan).nbytes == size_bytes


@pytest.mark.parametrize("init", ["uniform", "imagenet", "normal"])
def test_initial_offset_depends_only_on_seed_and_client(init: str) -> None:
    first = offset_of("a", plan_with(offset_init=init))
    torch.rand(100)  # other random numbers in between
    assert torch.equal(offset_of("a", plan_with(offset_init=init, alpha=0.7)), first)
    assert not torch.equal(offset_of("b", plan_with(offset_init=init)), first)
    assert not torch.equal(offset_of("a", plan_with(seed=1, offset_init=init)), first)


@pytest.mark.parametrize("init", ["uniform", "imagenet", "normal"])
def test_shared_offset_is_the_same_for_all_clients_of_one_seed(init: str) -> None:
    plan = plan_with(offset_init=init, shared_offset=True)
    assert torch.equal(offset_of("a", plan), offset_of("b", plan))
    assert not torch.equal(offset_of("a", plan), offset_of("a", plan_with(offset_init=init)))
    assert not torch.equal(offset_of("a", plan), offset_of("a", plan_with(1, offset_init=init, shared_offset=True)))


def test_no_client_id_collides_with_the_shared_offset() -> None:
    shared = offset_of("anyone", plan_with(shared_offset=True))
    assert not torch.equal(offset_of("everyone", plan_with()), shared)


def test_uniform_pixels_are_normalized_with_the_plan_s_statistics() -> None:
    pixels = offset_of("a", plan_with()) * 0.2 + 0.4
    assert float(pixels.min()) == pytest.approx(0, abs=1e-3)
    assert float(pixels.max()) == pytest.approx(1, abs=1e-3)
    assert float(pixels.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(pixels.std()) == pytest.approx(12**-0.5, abs=0.01)


def test_imagenet_pixels_are_the_uniform_ones_normalized_with_imagenet_s_statistics() -> None:
    pixels = offset_of("a", plan_with()) * 0.2 + 0.4
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (pixels - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(offset_of("a", plan_with(offset_init="imagenet")), expected, rtol=1e-4, atol=1e-5)


@given(st.integers(0, 2**40), st.text(max_size=8))
@settings(max_examples=30)
def test_uniform_pixels_are_those_of_torch_to_the_bit(seed: int, client: str) -> None:
    plan = plan_with(seed, offset_init="uniform")
    generator = torch.Generator().manual_seed(derive_seed(seed, "offset", f"client:{client}"))
    expected = normalize(torch.rand(plan.image.shape, generator=generator), plan.image.mean, plan.image.std)
    assert torch.equal(offset_of(client, plan), expected)


def test_imagenet_offset_has_the_measured_rms() -> None:
    offset = offset_of("a", plan_with(offset_init="imagenet"))
    assert float(offset.square().mean().sqrt()) == pytest.approx(1.30, abs=0.03)


def test_normal_and_zero_offsets_have_the_expected_distribution() -> None:
    normal = offset_of("a", plan_with(offset_init="normal"))
    assert float(normal.mean()) == pytest.approx(0, abs=0.05)
    assert float(normal.std()) == pytest.approx(1, abs=0.05)
    assert float(normal.abs().max()) > 3
    assert not offset_of("a", plan_with(offset_init="zeros")).any()


@given(factor=st.floats(-4, 4), seed=st.integers(0, 1000))
def test_motion_is_relative_to_the_norm_of_the_initial_offset(factor: float, seed: int) -> None:
    start = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    assert relative_motion(start * factor, start) == pytest.approx(abs(factor - 1), abs=1e-6)


def test_motion_matches_values_worked_out_by_hand() -> None:
    start, moved = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 5.0]]])
    assert relative_motion(moved, start) == pytest.approx(0.2)
    assert relative_motion(start, start) == 0


def test_motion_from_zero_is_the_rms() -> None:
    assert relative_motion(torch.full((1, 2, 2), -3.0), torch.zeros(1, 2, 2)) == pytest.approx(3)
