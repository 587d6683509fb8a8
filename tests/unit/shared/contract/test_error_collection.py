import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plan_texts import MINIMAL, plan_data, plan_errors

from shared.contract.errors import PlanError
from shared.contract.method_options import DistransOptions
from shared.contract.plan import (
    BUILT_IN_BACKBONES,
    MAX_IMAGE_VALUES,
    FederationPlan,
    ImagePlan,
    ModelPlan,
    parse_plan,
    validate_plan,
)


class TestCollection:
    def test_every_error_is_reported_at_once_by_field(self) -> None:
        errors = plan_errors(
            """
            name = "not a name"
            classes = ["owl"]
            seed = -1
            color = "red"
            averaging = "median"

            [image]
            height = 0
            mean = [0.1, 0.2]

            [model]
            backbone = "vgg"
            activation = "tanh"

            [method]
            alpha = 1.5
            beta = 1

            [method.generator]
            lr = -1

            [training]
            lr = "fast"
            epochs = 0

            [rounds]
            quorum = 0
            patience = 0.5
            """
        )
        assert errors.keys() == {
            *("name", "classes", "seed", "color", "averaging", "image.height", "model.backbone", "model.activation"),
            *("method.alpha", "method.beta", "method.generator.lr", "training.lr", "training.epochs"),
            *("rounds.quorum", "rounds.patience"),
            "image",  # its mean
        }
        assert all(errors.values())

    def test_conflicting_fields_are_reported_alongside_invalid_ones(self) -> None:
        with pytest.raises(PlanError) as caught:
            validate_plan(
                {
                    "classes": ["owl", 5],
                    "image": {"channels": 1, "height": 20, "mean": [1, 2], "std": [1, 2], "color": "gray"},
                    "model": {"backbone": "alexnet"},
                    "method": {
                        "alpha": 2,
                        "shared_offset": True,
                        "offset_aggregation": "none",
                        "offset_init": "imagenet",
                    },
                    "training": {"lr": "fast"},
                }
            )
        wanted = [
            *("name: is missing", "classes.1: ", "image.color: ", "method.alpha: ", "training.lr: "),
            *("image: mean has 2 values for 1 channels", "image: std has 2 values for 1 channels"),
            *("method: shared_offset = true", "plan: model.backbone: alexnet needs images of at least 63×63"),
            "plan: method.offset_init: ImageNet's statistics are for 3 channels",
        ]
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == len(wanted), lines
        for start in wanted:
            assert any(line.strip().startswith(start) for line in lines), start

    def test_rules_about_an_invalid_field_are_skipped(self) -> None:
        assert plan_errors(plan_data(model={"backbone": "vgg"}, image={"height": 8})).keys() == {"model.backbone"}
        assert plan_errors(plan_data(model={"backbone": "alexnet"}, image={"height": -8})).keys() == {"image.height"}
        assert plan_errors(plan_data(image={"channels": "red", "mean": [1, 2]})).keys() == {"image.channels"}

    def test_missing_fields_are_reported(self) -> None:
        assert plan_errors("") == {"name": "is missing", "classes": "is missing"}

    @pytest.mark.parametrize(
        "text",
        [
            "color = 1\n" + MINIMAL,
            MINIMAL + "[image]\ncolor = 1",
            MINIMAL + "[model]\ncolor = 1",
            MINIMAL + "[method]\ncolor = 1",
            MINIMAL + '[method]\nname = "fedavg"\ncolor = 1',
            MINIMAL + "[method.generator]\ncolor = 1",
            MINIMAL + "[training]\ncolor = 1",
            MINIMAL + "[rounds]\ncolor = 1",
        ],
    )
    def test_unknown_key_is_rejected_in_every_table(self, text: str) -> None:
        ((field, error),) = plan_errors(text).items()
        assert field.endswith("color")
        assert error.startswith("unknown setting; valid settings here: ")

    def test_setting_of_another_method_is_rejected(self) -> None:
        errors = plan_errors(MINIMAL + '[method]\nname = "fedavg"\nalpha = 0.3')
        assert errors.keys() == {"method.alpha"}

    @pytest.mark.parametrize("text", ["name = ", "name 1", "[image", 'name = "a"\nname = "b"', "\0"])
    def test_invalid_toml_is_rejected_with_its_position(self, text: str) -> None:
        with pytest.raises(PlanError, match=r"not valid TOML: .*line \d|not valid TOML: .*end of document"):
            parse_plan(text)

    @pytest.mark.parametrize("method", ["fedavg", 3, [], {"name": "fedsgd"}, {"name": 7}, {"name": ["fedavg"]}])
    def test_unknown_method_is_rejected(self, method: Any) -> None:
        assert plan_errors(plan_data(method=method)).keys() == {"method"}

    @pytest.mark.parametrize("data", [{}, {"image": 3}, {"model": []}, {"rounds": "many"}])
    def test_tables_of_the_wrong_type_are_rejected(self, data: dict[str, Any]) -> None:
        assert plan_errors(plan_data(**data, training=1)).keys() == {"training", *data}

    def test_plan_of_the_wrong_type_is_rejected(self) -> None:
        with pytest.raises(PlanError, match="plan: must be a table, but is"):
            validate_plan([1, 2])  # type: ignore[arg-type]


class TestRules:
    def test_repeated_classes_are_rejected(self) -> None:
        errors = plan_errors('name = "a"\nclasses = ["owl", "finch", " owl ", "rook", "finch"]')
        assert errors == {"classes": "classes must be distinct; repeated: finch, owl"}

    @pytest.mark.parametrize("classes", [[], ["owl"], ["owl", ""], ["owl", "  "], ["owl", "x" * 129], "owl", [1, 2]])
    def test_invalid_classes_are_rejected(self, classes: Any) -> None:
        fields = plan_errors({"name": "a", "classes": classes})
        assert {field.split(".")[0] for field in fields} == {"classes"}

    @pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "a\n", "é", "a" * 65])
    def test_invalid_federation_names_are_rejected(self, name: str) -> None:
        assert plan_errors({"name": name, "classes": ["a", "b"]}).keys() == {"name"}

    @pytest.mark.parametrize("backbone", BUILT_IN_BACKBONES)
    @pytest.mark.parametrize("narrow", ["height", "width"])
    def test_images_below_the_backbone_s_minimum_are_rejected(self, backbone: str, narrow: str) -> None:
        minimum = BUILT_IN_BACKBONES[backbone]
        sides = {"height": 70, "width": 70, narrow: minimum}
        assert validate_plan(plan_data(model={"backbone": backbone}, image=sides)).model.backbone == backbone
        if minimum > 1:
            errors = plan_errors(plan_data(model={"backbone": backbone}, image={**sides, narrow: minimum - 1}))
            assert f"{backbone} needs images of at least {minimum}×{minimum}" in errors["plan"]
            assert "model.backbone" in errors["plan"]
            assert str(minimum - 1) in errors["plan"]

    @pytest.mark.parametrize(
        "backbone", ["", "LeNet", "vgg", "a:", ":b", "a:b:c", "a-b:c", "1a:b", "a:1b", "a b:c", "a:b\n"]
    )
    def test_unknown_backbone_is_rejected_with_the_known_ones(self, backbone: str) -> None:
        errors = plan_errors(plan_data(model={"backbone": backbone}))
        assert "lenet, alexnet, resnet18, resnet50" in errors["model.backbone"]

    @pytest.mark.parametrize("backbone", ["nets:small", "my.deep.package:build_net", "_a._b:_c"])
    def test_custom_backbone_is_accepted(self, backbone: str) -> None:
        assert validate_plan(plan_data(model={"backbone": backbone})).model.backbone == backbone

    @pytest.mark.parametrize("backbone", ["lenet", "nets:small"])
    def test_imagenet_weights_are_rejected_for_backbones_without_them(self, backbone: str) -> None:
        errors = plan_errors(plan_data(model={"backbone": backbone, "weights": "imagenet"}))
        assert errors == {"model": f"there are no ImageNet weights for {backbone}"}

    @pytest.mark.parametrize("backbone", ["alexnet", "resnet18", "resnet50"])
    def test_imagenet_weights_are_accepted_for_torchvision_backbones(self, backbone: str) -> None:
        assert validate_plan(plan_data(model={"backbone": backbone, "weights": "imagenet"})).model.weights == "imagenet"

    @pytest.mark.parametrize("aggregation", ["none", "network"])
    def test_shared_offset_excludes_aggregation_per_client(self, aggregation: str) -> None:
        errors = plan_errors(plan_data(method={"shared_offset": True, "offset_aggregation": aggregation}))
        assert f"offset_aggregation = '{aggregation}'" in errors["method"]
        assert "use 'auto' or 'mean'" in errors["method"]

    def test_shared_offset_cannot_start_from_the_generator(self) -> None:
        errors = plan_errors(plan_data(method={"shared_offset": True, "offset_init": "generator"}))
        assert "cannot start from the generator" in errors["method"]

    @pytest.mark.parametrize("setting", [{"batchnorm": "separate"}, {"batchnorm": "joint"}, {"shared_dropout": True}])
    def test_single_input_channel_excludes_two_channel_settings(self, setting: dict[str, Any]) -> None:
        errors = plan_errors(plan_data(method={"input_channels": "single", **setting}))
        assert "batchnorm and shared_dropout apply to two channels" in errors["method"]

    def test_cross_entropy_excludes_hidden_rows(self) -> None:
        method = {"name": "fedaws", "client_loss": "cross-entropy", "evaluation_rows": False}
        assert "use 'hinge'" in plan_errors(plan_data(method=method))["method"]

    @pytest.mark.parametrize("aggregation", ["auto", "mean"])
    def test_shared_offset_is_accepted_with_auto_and_mean(self, aggregation: str) -> None:
        plan = validate_plan(plan_data(method={"shared_offset": True, "offset_aggregation": aggregation}))
        assert isinstance(plan.method, DistransOptions)
        assert plan.method.shared_offset

    def test_imagenet_offsets_are_rejected_for_grayscale_images(self) -> None:
        errors = plan_errors(plan_data(method={"offset_init": "imagenet"}, image={"channels": 1}))
        assert "method.offset_init: ImageNet's statistics are for 3 channels" in errors["plan"]

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
    @pytest.mark.parametrize(
        "field",
        [
            "training.lr",
            "training.clip_norm",
            "training.weight_decay",
            "method.alpha",
            "method.offset_lr",
            "method.generator.lr",
            "rounds.deadline_s",
        ],
    )
    def test_numbers_must_be_finite(self, field: str, value: str) -> None:
        table, _, key = field.rpartition(".")
        assert plan_errors(MINIMAL + f"[{table}]\n{key} = {value}").keys() == {field}

    @pytest.mark.parametrize("statistic", ["mean", "std"])
    @pytest.mark.parametrize("value", ["nan", "inf"])
    def test_image_statistics_must_be_finite(self, statistic: str, value: str) -> None:
        assert plan_errors(MINIMAL + f"[image]\n{statistic} = [{value}]").keys() == {f"image.{statistic}.0"}

    @pytest.mark.parametrize("statistic", ["mean", "std"])
    def test_image_statistics_must_match_the_channels(self, statistic: str) -> None:
        errors = plan_errors(plan_data(image={statistic: [0.5, 0.5]}))
        assert errors == {"image": f"{statistic} has 2 values for 3 channels; give 1 or 3"}

    @pytest.mark.parametrize("std", [0, -0.5])
    def test_standard_deviation_must_be_positive(self, std: float) -> None:
        assert plan_errors(plan_data(image={"std": [std]})).keys() == {"image.std.0"}

    def test_image_size_is_limited(self) -> None:
        assert validate_plan(plan_data(image={"channels": 1, "height": 4096, "width": 4096})).image.channels == 1
        errors = plan_errors(plan_data(image={"channels": 2, "height": 4096, "width": 4096}))
        assert errors == {"image": f"an image may have at most {MAX_IMAGE_VALUES} values"}

    @pytest.mark.parametrize("setting", ["momentum", "weight_decay"])
    def test_pfedme_rejects_optimizer_settings_it_does_not_use(self, setting: str) -> None:
        errors = plan_errors(plan_data(method={"name": "pfedme"}, training={setting: 0.1}))
        assert "pfedme uses neither" in errors["plan"]

    @pytest.mark.parametrize("name", ["pfedhn", "pfedhn-pc"])
    def test_hypernetworks_reject_given_weights(self, name: str) -> None:
        errors = plan_errors(plan_data(method={"name": name}, model={"weights": "file"}))
        assert "cannot start from given weights" in errors["plan"]

    @pytest.mark.parametrize("name", ["pfedhn", "pfedhn-pc"])
    def test_hypernetworks_have_no_updates_to_compress(self, name: str) -> None:
        errors = plan_errors(plan_data(method={"name": name}, training={"update_compression": "int8"}))
        assert "upload no shared weights to compress" in errors["plan"]

    def test_options_of_another_method_are_unknown(self) -> None:
        errors = plan_errors(plan_data(method={"name": "moon", "alpha": 0.3}))
        assert errors["method.alpha"].startswith("unknown setting; valid settings here: name, ")


_KEYS = st.sampled_from(
    [*FederationPlan.model_fields, *ImagePlan.model_fields, *ModelPlan.model_fields, *DistransOptions.model_fields]
)
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(_KEYS, _JUNK, max_size=6))
def test_arbitrary_data_is_a_plan_or_a_plan_error(data: dict[str, Any]) -> None:
    with contextlib.suppress(PlanError):
        validate_plan(data)
