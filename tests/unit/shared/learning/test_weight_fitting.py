import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision.models
from support.halves import server_half
from support.tensors import assert_same_tensors
from torch import Tensor, nn

from shared.contract.errors import WeightsError
from shared.contract.plan import FederationPlan, validate_plan
from shared.learning.model import build_double, build_single
from shared.learning.weight_fitting import fit_weights, parse_weights


def make_plan(backbone: str, method: str = "distrans", channels: int = 3, **model: Any) -> FederationPlan:
    return validate_plan(
        {
            "name": "test",
            "classes": ["a", "b", "c"],
            "image": {"channels": channels},
            "model": {"backbone": backbone, **model},
            "method": {"name": method},
        }
    )


@pytest.fixture(scope="module")
def resnet18() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return torchvision.models.resnet18(weights=None).state_dict()


@pytest.fixture(scope="module")
def alexnet() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return torchvision.models.alexnet(weights=None).state_dict()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class TestTorchvision:
    def test_resnet_provides_the_backbone_but_not_the_classifier(self, resnet18: dict[str, Tensor]) -> None:
        plan = make_plan("resnet18")
        model, untouched = build_double(plan, 0.3), build_double(plan, 0.3).state_dict()
        fit_weights(model, resnet18)
        loaded = {f"backbone.{name}": value for name, value in resnet18.items() if "fc." not in name}
        kept_random = {name: untouched[name] for name in ("logits.weight", "logits.bias")}
        assert_same_tensors(model.state_dict(), loaded | kept_random)

    def test_alexnet_s_last_layer_becomes_the_dense_layer(self, alexnet: dict[str, Tensor]) -> None:
        model = build_single(make_plan("alexnet"))
        logits = model.logits.weight.detach().clone()
        fit_weights(model, alexnet)
        state = model.state_dict()
        assert torch.equal(state["dense.weight"], alexnet["classifier.6.weight"])
        assert torch.equal(state["dense.bias"], alexnet["classifier.6.bias"])
        assert torch.equal(state["backbone.features.0.weight"], alexnet["features.0.weight"])
        assert torch.equal(state["backbone.classifier.4.bias"], alexnet["classifier.4.bias"])
        assert torch.equal(state["logits.weight"], logits)

    def test_dense_layer_of_another_width_stays_random(self, alexnet: dict[str, Tensor]) -> None:
        model = build_single(make_plan("alexnet", dense_dim=256))
        heads = ("dense.weight", "dense.bias", "logits.weight", "logits.bias")
        before = {name: model.state_dict()[name].clone() for name in heads}
        fit_weights(model, alexnet)
        assert_same_tensors({name: model.state_dict()[name] for name in heads}, before)

    def test_first_convolution_is_summed_over_colors_for_grayscale_images(self, resnet18: dict[str, Tensor]) -> None:
        """So a gray image gives the same output as three equal color channels."""
        model = build_single(make_plan("resnet18", channels=1))
        fit_weights(model, resnet18)
        gray = torch.randn(2, 1, 16, 16)
        colored = nn.functional.conv2d(gray.expand(-1, 3, -1, -1), resnet18["conv1.weight"], stride=2, padding=3)
        torch.testing.assert_close(model.backbone.conv1(gray), colored)  # type: ignore[operator, union-attr]

    def test_alexnet_sums_its_first_filters_for_gray_images(self, alexnet: dict[str, Tensor]) -> None:
        model = build_single(make_plan("alexnet", channels=1, dense_dim=4))
        fit_weights(model, alexnet)
        found = model.state_dict()["backbone.features.0.weight"]
        torch.testing.assert_close(found, alexnet["features.0.weight"].sum(dim=1, keepdim=True))

    def test_other_channels_are_refused(self, resnet18: dict[str, Tensor]) -> None:
        model = build_single(make_plan("resnet18", channels=4))
        message = r"backbone.conv1.weight is \[64, 3, 7, 7\], but the plan needs \[64, 4, 7, 7\]"
        with pytest.raises(WeightsError, match=message) as caught:
            fit_weights(model, resnet18)
        assert caught.value.next_step == "Use weights for the plan's backbone, image shape and channels."

    def test_counters_may_be_missing(self, resnet18: dict[str, Tensor]) -> None:
        """Checkpoints older than PyTorch 0.4.1 have none."""
        old = {name: value for name, value in resnet18.items() if not name.endswith("num_batches_tracked")}
        model = build_single(make_plan("resnet18"))
        fit_weights(model, old)
        assert int(model.state_dict()["backbone.bn1.num_batches_tracked"]) == 0

    def test_weights_are_converted_to_the_model_s_precision(self, resnet18: dict[str, Tensor]) -> None:
        halved = {name: value.half() if value.is_floating_point() else value for name, value in resnet18.items()}
        model = build_single(make_plan("resnet18"))
        fit_weights(model, halved)
        assert model.state_dict()["backbone.conv1.weight"].dtype == torch.float32
        assert torch.equal(model.state_dict()["backbone.conv1.weight"], halved["conv1.weight"].float())

    @pytest.mark.parametrize("left_out", ["conv1.weight", "layer4.1.bn2.running_var", "layer1.0.bn1.bias"])
    def test_missing_tensor_is_named_and_the_model_is_unchanged(
        self, resnet18: dict[str, Tensor], left_out: str
    ) -> None:
        model = build_single(make_plan("resnet18"))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(WeightsError, match=f"lack 1 tensors of the backbone, starting with 'backbone.{left_out}'"):
            fit_weights(model, {name: value for name, value in resnet18.items() if name != left_out})
        assert_same_tensors(model.state_dict(), before)

    def test_tensor_of_another_shape_is_refused_and_the_model_is_unchanged(self, resnet18: dict[str, Tensor]) -> None:
        model = build_single(make_plan("resnet18"))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(WeightsError, match=r"backbone.layer1.0.bn1.bias is \[65\], but the plan needs \[64\]"):
            fit_weights(model, resnet18 | {"layer1.0.bn1.bias": torch.zeros(65)})
        assert_same_tensors(model.state_dict(), before)

    @pytest.mark.parametrize("source", [{}, {"anything": torch.ones(1)}])
    def test_unrelated_weights_are_refused(self, source: dict[str, Tensor]) -> None:
        with pytest.raises(WeightsError, match="lack 6 tensors of the backbone") as caught:
            fit_weights(build_single(make_plan("lenet")), source)
        assert caught.value.next_step == "Use weights for the plan's backbone."

    def test_weights_of_another_backbone_are_refused(self, resnet18: dict[str, Tensor]) -> None:
        with pytest.raises(WeightsError, match=r"starting with 'backbone.features.0.weight'"):
            fit_weights(build_single(make_plan("alexnet", dense_dim=4)), resnet18)


class TestOwnModels:
    @pytest.mark.parametrize("method", ["distrans", "fedavg"])
    def test_complete_model_fits(self, method: str) -> None:
        plan = make_plan("lenet", method)
        trained = {name: value + 1 for name, value in server_half(plan).initial_state().shared.items()}
        stored = parse_weights(safetensors.torch.save(trained), "model.safetensors")
        assert_same_tensors(server_half(plan).initial_state(stored).shared, trained)

    def test_head_of_another_shape_stays_random(self) -> None:
        source = {name: value + 1 for name, value in build_single(make_plan("lenet")).state_dict().items()}
        model = build_double(make_plan("lenet"), 0.3)
        before = model.state_dict()["logits.weight"].clone()
        fit_weights(model, source)
        assert_same_tensors(dict(model.state_dict()), source | {"logits.weight": before})

    def test_model_for_other_images_is_refused(self) -> None:
        small = validate_plan({"name": "a", "classes": ["a", "b"], "image": {"height": 32, "width": 32}})
        with pytest.raises(WeightsError, match="do not fit the backbone"):
            fit_weights(build_single(make_plan("lenet")), build_single(small).state_dict())


class TestBothMethods:
    @pytest.mark.parametrize("backbone", ["resnet18", "lenet"])
    def test_fedavg_and_distrans_start_from_the_same_weights(self, backbone: str, resnet18: dict[str, Tensor]) -> None:
        pretrained = resnet18 if backbone == "resnet18" else None
        states = [
            server_half(make_plan(backbone, method)).initial_state(pretrained).shared
            for method in ("distrans", "fedavg")
        ]
        backbones = [
            {name: value for name, value in state.items() if not name.startswith("logits.")} for state in states
        ]
        assert_same_tensors(*backbones)
        assert len(backbones[0]) > 5

    def test_pretrained_weights_replace_the_random_ones(self, resnet18: dict[str, Tensor]) -> None:
        server = server_half(make_plan("resnet18"))
        random, pretrained = server.initial_state().shared, server.initial_state(resnet18).shared
        assert not torch.equal(random["backbone.conv1.weight"], pretrained["backbone.conv1.weight"])
        assert torch.equal(random["logits.weight"], pretrained["logits.weight"])

    def test_model_does_not_share_memory_with_the_source(self, resnet18: dict[str, Tensor]) -> None:
        state = server_half(make_plan("resnet18")).initial_state(resnet18).shared
        before = resnet18["conv1.weight"].clone()
        state["backbone.conv1.weight"].zero_()
        assert torch.equal(resnet18["conv1.weight"], before)


class Trap:
    """Writes a file when unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "sprung")


class TestFiles:
    TENSORS = {"conv.weight": torch.arange(4.0), "steps": torch.tensor(3)}  # noqa: RUF012 - never modified

    @pytest.mark.parametrize("name", ["weights.pth", "weights.pt", "weights", "a.b/weights.bin"])
    def test_state_dict_is_read_whatever_the_file_name(self, name: str) -> None:
        assert_same_tensors(parse_weights(saved(self.TENSORS), name), self.TENSORS)

    def test_state_dict_of_a_module_is_read(self) -> None:
        net = nn.BatchNorm1d(3)
        assert_same_tensors(parse_weights(saved(net.state_dict()), "a.pth"), dict(net.state_dict()))

    def test_state_dict_in_the_old_format_is_read(self) -> None:
        buffer = io.BytesIO()
        torch.save(self.TENSORS, buffer, _use_new_zipfile_serialization=False)
        assert_same_tensors(parse_weights(buffer.getvalue(), "a.pth"), self.TENSORS)

    def test_state_dict_inside_a_checkpoint_is_found(self) -> None:
        checkpoint = {"epoch": 3, "optimizer": {"lr": 0.1}, "state_dict": self.TENSORS}
        assert_same_tensors(parse_weights(saved(checkpoint), "a.pth"), self.TENSORS)

    def test_safetensors_file_is_read(self) -> None:
        assert_same_tensors(parse_weights(safetensors.torch.save(self.TENSORS), "a.safetensors"), self.TENSORS)

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_code_in_a_file_is_refused_and_not_run(self, tmp_path: Path, wrapped: bool) -> None:
        mark = tmp_path / "sprung"
        trap: Any = Trap(mark)
        data = saved({"state_dict": {"w": torch.ones(1), "trap": trap}} if wrapped else trap)
        with pytest.raises(WeightsError, match=r"weights\.pth cannot be read as a file of tensors") as caught:
            parse_weights(data, "weights.pth")
        assert caught.value.next_step is not None
        assert "state_dict" in caught.value.next_step
        assert not mark.exists()
        torch.load(io.BytesIO(data), weights_only=False)
        assert mark.exists()  # the trap works

    def test_bare_pickle_is_refused_and_not_run(self, tmp_path: Path) -> None:
        mark = tmp_path / "sprung"
        with pytest.raises(WeightsError, match="cannot be read"):
            parse_weights(pickle.dumps(Trap(mark)), "weights.pth")
        assert not mark.exists()

    def test_pickled_network_is_refused(self) -> None:
        with pytest.raises(WeightsError, match="cannot be read") as caught:
            parse_weights(saved(nn.Linear(2, 2)), "net.pth")
        assert caught.value.next_step is not None
        assert "state_dict" in caught.value.next_step

    @pytest.mark.parametrize(
        "value", [torch.ones(2), [torch.ones(2)], {"w": 3}, {"w": torch.ones(1), "lr": 0.1}, {"state_dict": 3}, None]
    )
    def test_file_without_named_tensors_is_refused(self, value: Any) -> None:
        with pytest.raises(WeightsError, match=r"a\.pth contains something other than named tensors"):
            parse_weights(saved(value), "a.pth")

    @pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04" + bytes(50), b"\x80\x02]q\x00.", bytes(1000)])
    @pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
    def test_garbage_is_refused_with_the_file_name(self, data: bytes, name: str) -> None:
        with pytest.raises(WeightsError, match=name):
            parse_weights(data, name)

    @pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
    def test_truncated_file_is_refused(self, name: str) -> None:
        data = saved(self.TENSORS) if name == "a.pth" else safetensors.torch.save(self.TENSORS)
        for length in range(0, len(data), 37):
            with pytest.raises(WeightsError, match=name):
                parse_weights(data[:length], name)
