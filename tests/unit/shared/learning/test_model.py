import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensors import assert_same_tensors
from torch import Tensor, nn

from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.backbones import Backbone
from shared.learning.model import (
    DoubleChannelModel,
    PlanFeatureExtractor,
    SingleChannelModel,
    batchnorms,
    blend,
    build_double,
    build_single,
    frozen_statistics,
)
from shared.tensors.spec import Spec

ALPHA = 0.3
CLASSES = [str(number) for number in range(10)]


def plan_for(backbone: str, shape: tuple[int, int, int], seed: int = 0, **model: Any) -> FederationPlan:
    channels, height, width = shape
    return validate_plan(
        {
            "name": "model",
            "classes": CLASSES,
            "seed": seed,
            "image": {"channels": channels, "height": height, "width": width},
            "model": {"backbone": backbone, **model},
        }
    )


@pytest.fixture
def own_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A custom network without a stem or BatchNorm."""
    (tmp_path / "a_users_network.py").write_text(
        "from torch import nn\n"
        "def build(channels, height, width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 12), nn.Tanh())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "a_users_network:build"


def two_passes(model: DoubleChannelModel, x: Tensor, offset: Tensor) -> Tensor:
    """Eq. 1 and the paper's network, written out literally."""
    left, right = blend(x, offset, model.alpha)
    logits: Tensor = model.logits(torch.cat([model.features(left), model.features(right)], dim=1))
    return logits


def without_dropout(model: DoubleChannelModel) -> DoubleChannelModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def small_net_with_batchnorm() -> DoubleChannelModel:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5), nn.BatchNorm1d(5)]
    return DoubleChannelModel(Backbone(nn.Sequential(*layers), features=5), classes=3, alpha=ALPHA)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


numbers = st.floats(-3, 3)
alphas = st.floats(0, 1)


@given(pixel=numbers, shift=numbers, alpha=alphas, seed=st.integers(0, 1000))
def test_channels_average_to_the_image_and_differ_by_twice_alpha_times_the_distance(
    pixel: float, shift: float, alpha: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 1, 3, 3, generator=generator, dtype=torch.float64) + pixel
    offset = torch.randn(1, 3, 3, generator=generator, dtype=torch.float64) + shift
    left, right = blend(x, offset, alpha)
    torch.testing.assert_close((left + right) / 2, x)
    torch.testing.assert_close(left - right, 2 * alpha * (offset - x))
    torch.testing.assert_close(left, (1 - alpha) * x + alpha * offset)


@given(alpha=alphas, pixel=numbers)
def test_image_equal_to_the_offset_is_unchanged_in_both_channels(alpha: float, pixel: float) -> None:
    offset = torch.full((3, 2, 2), pixel, dtype=torch.float64)
    left, right = blend(offset[None], offset, alpha)
    torch.testing.assert_close(left, offset[None])
    torch.testing.assert_close(right, offset[None])


def test_blending_does_not_clip() -> None:
    left, right = blend(torch.full((1, 1, 1, 1), 9.0), torch.full((1, 1, 1), -9.0), 0.5)
    assert (left.item(), right.item()) == (0.0, 18.0)


@given(alpha=alphas, seed=st.integers(0, 1000))
def test_offset_s_gradient_is_alpha_times_the_sum_of_the_channels_difference(alpha: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 1, 3, 3, generator=generator, dtype=torch.float64)
    offset = torch.randn(1, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(18, generator=generator, dtype=torch.float64)
    left, right = blend(x, offset, alpha)
    loss = torch.tanh(torch.cat([left, right], dim=1).flatten(1) @ weight).square().mean()
    by_offset, by_left, by_right = torch.autograd.grad(loss, [offset, left, right])
    torch.testing.assert_close(by_offset, alpha * (by_left - by_right).sum(dim=0))


def test_model_at_alpha_zero_is_the_single_one_with_both_heads_summed() -> None:
    plan = plan_for("lenet", (1, 16, 16), activation="relu")
    double, single = build_double(plan, alpha=0.0).double(), build_single(plan).double()
    with torch.no_grad():
        single.logits.weight.copy_(sum(double.logits.weight.chunk(2, dim=1)))
    x, offset = torch.randn(3, 1, 16, 16).double(), torch.randn(1, 16, 16).double()
    torch.testing.assert_close(double(x, offset), single(x), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(build_double(plan, alpha=ALPHA).double()(x, offset), single(x))


def test_offset_has_no_gradient_at_alpha_zero() -> None:
    model = build_double(plan_for("lenet", (1, 16, 16)), alpha=0.0)
    offset = torch.randn(1, 16, 16, requires_grad=True)
    model(torch.randn(3, 1, 16, 16), offset).square().sum().backward()
    assert offset.grad is not None
    assert not offset.grad.any()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("backbone", "shape", "has_stem"),
    [
        ("lenet", (1, 16, 20), True),
        ("lenet", (3, 14, 14), True),
        ("resnet18", (3, 24, 24), True),
        ("resnet18", (2, 16, 16), True),
        ("own", (2, 5, 7), False),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_model_and_gradients_match_two_explicit_passes(
    backbone: str, shape: tuple[int, int, int], has_stem: bool, training: bool, own_backbone: str
) -> None:
    """For every shortcut of the forward pass: a stem that sees the image once, one pass over both channels."""
    name = own_backbone if backbone == "own" else backbone
    model = build_double(plan_for(name, shape, activation="relu"), ALPHA).double().train(training)
    assert bool(model._stem) == has_stem
    x = torch.randn(5, *shape).double()
    offset = torch.randn(shape).double().requires_grad_()
    wanted = [offset, *model.parameters()]
    with frozen_statistics(model):  # running statistics are tested below
        found, expected = model(x, offset), two_passes(model, x, offset)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        direction = torch.randn_like(found)
        found_gradients = torch.autograd.grad((found * direction).sum(), wanted)
        expected_gradients = torch.autograd.grad((expected * direction).sum(), wanted)
    for found_one, expected_one in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found_one, expected_one, rtol=1e-7, atol=1e-7)


def test_alexnet_matches_two_explicit_passes() -> None:
    shape = (3, 64, 64)
    model = without_dropout(build_double(plan_for("alexnet", shape, dense_dim=16), ALPHA))
    x, offset = torch.randn(2, *shape), torch.randn(shape)
    with torch.no_grad():
        for training in (True, False):
            model.train(training)
            torch.testing.assert_close(model(x, offset), two_passes(model, x, offset), rtol=1e-4, atol=1e-5)


def test_dropout_draws_a_separate_mask_for_each_channel() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5))
    model = DoubleChannelModel(Backbone(net, features=100), classes=2, alpha=0.0)
    seen: list[Tensor] = []
    model.logits.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.train()(torch.ones(1, 1, 10, 10), torch.zeros(1, 10, 10))
    left, right = seen[0].chunk(2, dim=1)
    assert not torch.equal(left, right)


def test_channels_are_normalized_separately_in_training_and_both_update_running_statistics() -> None:
    model, x, offset = small_net_with_batchnorm().train(), torch.randn(6, 1, 8, 8), torch.randn(1, 8, 8)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    logits, found = model(x, offset), buffers_of(model)
    model.load_state_dict(start)
    assert torch.equal(logits, two_passes(model, x, offset))
    assert_same_tensors(found, buffers_of(model))
    assert [int(layer.num_batches_tracked) for layer in batchnorms(model)] == [2, 2]  # type: ignore[arg-type]


def test_resnet_updates_its_running_statistics_like_two_passes() -> None:
    model = build_double(plan_for("resnet18", (1, 16, 16)), ALPHA).double().train()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    x, offset = torch.randn(4, 1, 16, 16).double(), torch.randn(1, 16, 16).double()
    with torch.no_grad():
        model(x, offset)
        found = buffers_of(model)
        model.load_state_dict(start)
        two_passes(model, x, offset)
    for name, expected in buffers_of(model).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-8)
        if name.endswith("num_batches_tracked"):
            assert int(found[name]) == 2


def test_frozen_statistics_normalize_by_the_batch_and_change_no_buffer() -> None:
    model, x, offset = small_net_with_batchnorm().train(), torch.randn(6, 1, 8, 8), torch.randn(1, 8, 8)
    model(torch.randn(6, 1, 8, 8) + 3, offset)  # running statistics unlike those of x
    before = buffers_of(model)
    with frozen_statistics(model):
        frozen = model(x, offset)
    assert_same_tensors(buffers_of(model), before)
    assert torch.equal(frozen, model(x, offset))  # normalized by the batch, as in training
    assert not torch.allclose(frozen, model.eval()(x, offset))


def test_statistics_are_updated_again_after_a_frozen_pass_even_if_it_failed() -> None:
    model, offset = small_net_with_batchnorm().train(), torch.randn(1, 8, 8)
    with pytest.raises(ZeroDivisionError), frozen_statistics(model):
        raise ZeroDivisionError
    model(torch.randn(6, 1, 8, 8), offset)
    assert [int(layer.num_batches_tracked) for layer in batchnorms(model)] == [2, 2]  # type: ignore[arg-type]


def test_frozen_statistics_do_not_enable_tracking_in_layers_without_it() -> None:
    layer = nn.BatchNorm2d(2, track_running_stats=False)
    with frozen_statistics(nn.Sequential(layer)):
        pass
    assert not layer.track_running_stats


def test_weights_follow_from_the_seed() -> None:
    one, same, other = (build_double(plan_for("lenet", (1, 16, 16), seed), ALPHA).state_dict() for seed in (1, 1, 2))
    assert_same_tensors(one, same)
    assert all(not torch.equal(one[name], other[name]) for name in one if name.endswith("weight"))


def test_building_a_model_does_not_disturb_the_caller_s_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_double(plan_for("lenet", (1, 16, 16)), ALPHA)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("backbone", "dense_dim"), [("lenet", None), ("lenet", 7), ("resnet18", None)])
def test_all_models_start_from_the_same_backbone_and_dense_layer(backbone: str, dense_dim: int | None) -> None:
    plan = plan_for(backbone, (1, 16, 16), dense_dim=dense_dim)
    single, double = build_single(plan).state_dict(), build_double(plan, ALPHA).state_dict()
    assert single.keys() == double.keys()
    for name in single:
        if name != "logits.weight":
            assert torch.equal(single[name], double[name]), name
    for name, value in PlanFeatureExtractor(plan).state_dict().items():
        assert torch.equal(value, single[name]), name
    rows, columns = single["logits.weight"].shape
    assert double["logits.weight"].shape == (rows, 2 * columns)


def test_logits_start_with_kaiming_weights_and_zero_bias() -> None:
    plan = plan_for("lenet", (1, 16, 16))
    models: list[SingleChannelModel | DoubleChannelModel] = [build_single(plan), build_double(plan, ALPHA)]
    for model in models:
        assert not model.logits.bias.any()
        bound = (6 / model.logits.in_features) ** 0.5  # Kaiming's
        assert 0.9 * bound < float(model.logits.weight.detach().abs().max()) <= bound


# Network: bytes of the single and the double model, and the paper's overhead with one offset, in percent.
PAPER_OVERHEADS = {
    "lenet": (4_342_328, 4_346_328, 1.225),
    "alexnet": (244_443_400, 244_483_400, 0.0365),
    "resnet18": (44_765_128, 44_785_608, 0.1557),
    "resnet50": (94_326_992, 94_408_912, 0.1391),
}


def saved_bytes(offset: Tensor) -> int:
    file = io.BytesIO()
    np.save(file, offset.numpy())
    return len(file.getvalue())


def test_communication_overheads_match_the_paper_s_table() -> None:
    """Run pytest with -s to see the table."""
    offset = torch.zeros(3, 64, 64)
    assert offset.nbytes == 49_152
    assert saved_bytes(offset) == 49_280
    lines = [f"{'network':9} {'single':>12} {'double':>12} {'more':>7} {'with one offset':>16}"]
    for backbone, (single_bytes, double_bytes, percent) in PAPER_OVERHEADS.items():
        plan = plan_for(backbone, (3, 64, 64))
        with torch.device("meta"):
            single = Spec.of(build_single(plan).state_dict()).data_bytes
            double = Spec.of(build_double(plan, ALPHA).state_dict()).data_bytes
        assert (single, double) == (single_bytes, double_bytes), backbone
        overhead = 100 * (double - single + saved_bytes(offset)) / single
        assert overhead == pytest.approx(percent, abs=0.002), backbone  # the paper divides by file sizes
        lines.append(f"{backbone:9} {single:12,} {double:12,} {double - single:7,} {overhead:14.4f} %")
    print("\n".join(["", *lines]))  # noqa: T201


def test_alexnet_as_released_is_smaller_than_the_single_model() -> None:
    with torch.device("meta"):
        model = build_double(plan_for("alexnet", (3, 64, 64), dense_dim=256), ALPHA)
    assert Spec.of(model.state_dict()).data_bytes == 232_231_208


def test_lenet_has_the_authors_number_of_parameters() -> None:
    plan = plan_for("lenet", (3, 64, 64))
    with torch.device("meta"):
        models: list[nn.Module] = [build_single(plan), build_double(plan, ALPHA)]
    assert [sum(weight.numel() for weight in model.parameters()) for model in models] == [1_085_582, 1_086_582]


@pytest.mark.parametrize(("initialization", "low", "high"), [("torch", 0.2, 0.5), ("kaiming", 3.0, 8.0)])
@pytest.mark.parametrize("seed", range(4))
def test_lenet_starts_with_logits_of_the_authors_size_only_if_initialized_like_theirs(
    initialization: str, low: float, high: float, seed: int
) -> None:
    """Their code's logits have a standard deviation of 4 to 7 at first, torch's defaults give .24 to .43."""
    plan = plan_for("lenet", (3, 64, 64), seed, activation="none", initialization=initialization)
    x, offset = torch.randn(32, 3, 64, 64, generator=torch.Generator().manual_seed(seed)), torch.zeros(3, 64, 64)
    with torch.no_grad():
        spread = float(build_double(plan, ALPHA)(x, offset).std())
    assert low < spread < high
