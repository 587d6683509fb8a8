import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torchvision.models
from hypothesis import given
from hypothesis import strategies as st
from support.tensors import assert_same_tensors
from torch import Tensor, nn

from shared.contract.errors import BackboneError
from shared.contract.plan import BUILT_IN_BACKBONES, ImagePlan
from shared.learning.backbones import Stem, Stemmed, build_backbone
from shared.learning.model import blend
from shared.learning.seeds import seeded

FEATURES = {"lenet": 100, "alexnet": 4096, "resnet18": 512, "resnet50": 2048, "cnn": 84}


def image(channels: int = 3, height: int = 64, width: int = 64) -> ImagePlan:
    return ImagePlan(channels=channels, height=height, width=width)


class TestBuiltIn:
    @pytest.mark.parametrize("name", BUILT_IN_BACKBONES)
    def test_backbone_trains_at_its_minimum_image_size(self, name: str) -> None:
        side = BUILT_IN_BACKBONES[name]
        backbone = build_backbone(name, image(height=side, width=side))
        features = backbone.net.train()(torch.randn(2, 3, side, side))
        assert features.shape == (2, FEATURES[name]) == (2, backbone.features)
        features.square().mean().backward()
        gradients = [parameter.grad for parameter in backbone.net.parameters()]
        assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)

    @pytest.mark.parametrize("name", BUILT_IN_BACKBONES)
    def test_a_damaged_weight_shows_in_the_features(self, name: str) -> None:
        """Some fast kernels drop NaN: a diverged model would then pass for one that predicts."""
        net = build_backbone(name, image()).net.eval()
        with torch.no_grad():
            next(net.parameters()).view(-1)[0] = float("nan")
            assert bool(net(torch.randn(2, 3, 64, 64)).isnan().any())

    @pytest.mark.parametrize("name", ["lenet", "alexnet"])
    @pytest.mark.parametrize("narrow", ["height", "width", "both"])
    def test_images_below_the_minimum_are_refused(self, name: str, narrow: str) -> None:
        minimum = BUILT_IN_BACKBONES[name]
        sides = {side: minimum - (narrow in (side, "both")) for side in ("height", "width")}
        with pytest.raises(BackboneError, match=f"needs images of at least {minimum}×{minimum}, not ") as caught:
            build_backbone(name, image(**sides))
        assert f"{sides['height']}×{sides['width']}" in str(caught.value)
        assert caught.value.next_step is not None

    @pytest.mark.parametrize(
        ("name", "layers"),
        [
            ("lenet", lambda: nn.Sequential(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5))),
            ("alexnet", lambda: torchvision.models.alexnet(weights=None).features),
        ],
    )
    def test_minimum_is_the_smallest_size_the_layers_accept(self, name: str, layers: Callable[[], nn.Module]) -> None:
        minimum = BUILT_IN_BACKBONES[name]
        with torch.device("meta"):
            net = layers()
            assert net(torch.zeros(1, 3, minimum, minimum)).shape[2:] == (1, 1)
            with pytest.raises(RuntimeError, match=r"too small|can't be greater than actual input size"):
                net(torch.zeros(1, 3, minimum - 1, minimum - 1))

    @pytest.mark.parametrize("channels", [1, 3, 4])
    @pytest.mark.parametrize("name", BUILT_IN_BACKBONES)
    def test_any_number_of_channels_and_any_sides_are_accepted(self, name: str, channels: int) -> None:
        height, width = BUILT_IN_BACKBONES[name] + 1, BUILT_IN_BACKBONES[name] + 30
        with torch.device("meta"):
            for sides in ((height, width), (width, height)):
                backbone = build_backbone(name, image(channels, *sides))
                assert backbone.net(torch.zeros(2, channels, *sides)).shape == (2, FEATURES[name])
                assert backbone.stem is not None
                assert backbone.stem.in_channels == channels

    @pytest.mark.parametrize("channels", [1, 3, 4])
    def test_resnet_s_stem_starts_as_torchvision_s_does(self, channels: int) -> None:
        stem = build_backbone("resnet18", image(channels)).stem
        assert stem is not None
        assert float(stem.weight.detach().std()) == pytest.approx((2 / (64 * 7 * 7)) ** 0.5, rel=0.1)

    def test_only_alexnet_has_a_dense_layer_by_default(self) -> None:
        with torch.device("meta"):
            widths = {name: build_backbone(name, image()).dense_dim for name in BUILT_IN_BACKBONES}
        assert widths == {"lenet": None, "alexnet": 1000, "resnet18": None, "resnet50": None, "cnn": None}

    def test_lenet_has_the_paper_s_size(self) -> None:
        net = build_backbone("lenet", image()).net
        assert sum(parameter.numel() for parameter in net.parameters()) == 456 + 2_416 + 1_081_700

    @pytest.mark.parametrize(("activation", "number"), [("none", 0), ("relu", 3)])
    def test_lenet_has_relus_only_on_request(self, activation: str, number: int) -> None:
        net = build_backbone("lenet", image(), activation).net
        assert sum(isinstance(layer, nn.ReLU) for layer in net.modules()) == number

    def test_lenet_has_kaiming_weights_and_no_biases_on_request(self) -> None:
        with seeded("lenet"):
            net = build_backbone("lenet", image(), initialization="kaiming").net
        layers = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        assert len(layers) == 3
        for layer, inputs in zip(layers, (3 * 25, 6 * 25, 16 * 26 * 26), strict=True):
            assert not layer.bias.any()
            assert float(layer.weight.detach().abs().max()) == pytest.approx((6 / inputs) ** 0.5, rel=0.05)

    def test_other_networks_keep_their_own_initial_weights(self) -> None:
        built = []
        for initialization in ("torch", "kaiming"):
            with seeded("cnn"):
                built.append(build_backbone("cnn", image(), initialization=initialization).net.state_dict())
        assert_same_tensors(*built)

    @pytest.mark.parametrize(
        ("name", "left_out"),
        [
            ("resnet18", {"fc.weight", "fc.bias"}),
            ("resnet50", {"fc.weight", "fc.bias"}),
            ("alexnet", {"classifier.6.weight", "classifier.6.bias"}),
        ],
    )
    def test_names_and_shapes_match_torchvision_s(self, name: str, left_out: set[str]) -> None:
        with torch.device("meta"):
            ours = build_backbone(name, image()).net.state_dict()
            theirs = torchvision.models.get_model(name, weights=None).state_dict()
        assert {key: value.shape for key, value in ours.items()} == {
            key: value.shape for key, value in theirs.items() if key not in left_out
        }

    @pytest.mark.parametrize("side", [40, 64, 100])
    def test_resnet_computes_what_torchvision_s_does(self, side: int) -> None:
        """Up to rounding, because our activations are in another order in memory."""
        backbone = build_backbone("resnet18", image(height=side, width=side))
        theirs = torchvision.models.resnet18(weights=None)
        theirs.load_state_dict(backbone.net.state_dict(), strict=False)
        theirs.fc = nn.Identity()
        x = torch.randn(4, 3, side, side)
        torch.testing.assert_close(backbone.net.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)
        for net in (backbone.net, theirs):
            net.eval()(x).square().mean().backward()
        gradients = dict(theirs.named_parameters())
        for name, parameter in backbone.net.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("name", ["lenet", "resnet18"])
    def test_backbone_accepts_its_stem_s_output_in_place_of_the_image(self, name: str) -> None:
        backbone = build_backbone(name, image())
        assert backbone.stem is not None
        net, x = backbone.net.eval(), torch.randn(2, 3, 64, 64)
        assert torch.equal(net(Stemmed(backbone.stem(x))), net(x))


class TestStem:
    @given(st.floats(0, 1), st.booleans(), st.integers(0, 100))
    def test_blend_is_the_convolution_of_the_blended_channels(self, alpha: float, bias: bool, seed: int) -> None:
        torch.manual_seed(seed)
        stem = Stem(3, 4, 5, stride=2, padding=1, bias=bias).double()
        x, offset = torch.randn(2, 3, 9, 11).double(), torch.randn(3, 9, 11).double()
        for found, channel in zip(stem.blend(stem.image_term(x), offset, alpha), blend(x, offset, alpha), strict=True):
            torch.testing.assert_close(found, stem(channel), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("bias", [False, True])
    def test_gradients_match_the_convolution_of_the_blended_channels(self, bias: bool) -> None:
        stem = Stem(3, 4, 5, bias=bias).double()
        x, offset = torch.randn(2, 3, 9, 11).double(), torch.randn(3, 9, 11).double().requires_grad_()
        wanted = [offset, *stem.parameters()]

        def gradients(channels: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(channels[0].square().sum() + channels[1].pow(3).sum(), wanted)

        left, right = blend(x, offset, 0.3)
        torch.testing.assert_close(
            gradients(stem.blend(stem.image_term(x), offset, 0.3)), gradients((stem(left), stem(right)))
        )

    @pytest.mark.parametrize("bias", [False, True])
    def test_stem_replaces_a_layer(self, bias: bool) -> None:
        layer = nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 2), bias=bias)
        x = torch.randn(2, 3, 12, 12)
        assert torch.equal(Stem.in_place_of(layer, 3)(x), layer(x))
        assert Stem.in_place_of(layer, 5)(torch.randn(2, 5, 12, 12)).shape == layer(x).shape


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Write a text as the module `own_nets` into a folder of DISTRANS_PLUGINS."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("DISTRANS_PLUGINS", str(tmp_path))

    def write(text: str) -> None:
        (tmp_path / "own_nets.py").write_text("import torch\nfrom torch import nn\n" + text)

    yield write
    sys.modules.pop("own_nets", None)


class TestCustom:
    def test_it_is_given_the_images_shape(self, own_module: Callable[[str], None]) -> None:
        own_module(
            "def build(channels, height, width):\n"
            "    assert (channels, height, width) == (1, 6, 8)\n"
            "    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())\n"
        )
        backbone = build_backbone("own_nets:build", image(1, 6, 8))
        assert (backbone.features, backbone.dense_dim, backbone.stem) == (2 * 4 * 6, None, None)
        assert backbone.net(torch.randn(5, 1, 6, 8)).shape == (5, 48)

    def test_looking_at_it_changes_nothing_in_it(self, own_module: Callable[[str], None]) -> None:
        own_module("def build(*shape):\n    return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten())\n")
        net = build_backbone("own_nets:build", image(3, 2, 2)).net
        assert net.training
        assert int(net.state_dict()["0.num_batches_tracked"]) == 0
        assert all(parameter.grad is None for parameter in net.parameters())

    def test_it_can_be_built_without_memory(self, own_module: Callable[[str], None]) -> None:
        own_module("def build(c, h, w):\n    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, 7))\n")
        with torch.device("meta"):
            backbone = build_backbone("own_nets:build", image())
        assert backbone.features == 7
        assert all(parameter.is_meta for parameter in backbone.net.parameters())

    @pytest.mark.parametrize("name", ["", "vgg", "LeNet", "lenet:", ":lenet"])
    def test_unknown_backbone_lists_the_built_in_ones(self, name: str) -> None:
        with pytest.raises(BackboneError, match="There is no backbone") as caught:
            build_backbone(name, image())
        assert caught.value.next_step is not None
        assert "lenet, alexnet, resnet18, resnet50" in caught.value.next_step

    def test_missing_module(self) -> None:
        with pytest.raises(BackboneError, match="cannot be imported: No module named 'no_such_package'") as caught:
            build_backbone("no_such_package.nets:build", image())
        assert "DISTRANS_PLUGINS (not set)" in caught.value.message
        assert caught.value.next_step == (
            "Install 'no_such_package', or add the folder that contains it to DISTRANS_PLUGINS, "
            "on the coordinator and at every site."
        )

    def test_missing_function(self, own_module: Callable[[str], None]) -> None:
        own_module("")
        with pytest.raises(BackboneError, match=r"cannot be imported: .*no attribute 'build'"):
            build_backbone("own_nets:build", image())

    @pytest.mark.parametrize(
        ("text", "reason"),
        [("1 / 0", "division by zero"), ("def (", "invalid syntax"), ("open('/no/file')", "No such")],
    )
    def test_module_that_cannot_be_imported(self, own_module: Callable[[str], None], text: str, reason: str) -> None:
        own_module(text)
        with pytest.raises(BackboneError, match=f"cannot be imported: .*{reason}"):
            build_backbone("own_nets:build", image())

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("def build(*shape):\n    raise ValueError('only squares')", "only squares"),
            ("def build(channels):\n    pass", "positional argument"),
            ("def build(*shape):\n    return None", "NoneType"),
            ("build = 3", "not callable"),
            ("def build(*shape):\n    return nn.Linear(5, 5)", "shapes cannot be multiplied"),
        ],
    )
    def test_failing_build_function_is_reported_with_its_reason(
        self, own_module: Callable[[str], None], text: str, reason: str
    ) -> None:
        own_module(text)
        with pytest.raises(BackboneError, match=f"fails on images of 3×8×9: .*{reason}"):
            build_backbone("own_nets:build", image(3, 8, 9))

    @pytest.mark.parametrize(
        ("forward", "found"),
        [
            ("x", r"tensor of shape \(2, 3, 8, 9\)"),
            ("x.mean()", r"tensor of shape \(\)"),
            ("x.flatten()", r"tensor of shape \(432,\)"),
            ("x.flatten(1).t()", r"tensor of shape \(216, 2\)"),
            ("(x.flatten(1), x)", "tuple"),
            ("x.flatten(1).tolist()", "list"),
        ],
    )
    def test_output_that_is_not_a_feature_matrix_is_refused(
        self, own_module: Callable[[str], None], forward: str, found: str
    ) -> None:
        own_module(
            "class Net(nn.Module):\n"
            "    def forward(self, x):\n"
            f"        return {forward}\n"
            "def build(*shape):\n"
            "    return Net()\n"
        )
        with pytest.raises(BackboneError, match=f"maps 2 images to a {found}") as caught:
            build_backbone("own_nets:build", image(3, 8, 9))
        assert caught.value.next_step == "It must return one flat feature vector per image."
