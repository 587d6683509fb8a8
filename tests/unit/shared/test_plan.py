import contextlib
import json
import subprocess
import sys
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.method_options import (
    AdvPropOptions,
    DistransOptions,
    FedAvgOptions,
    FedAwSOptions,
    MixupOptions,
    MoonOptions,
    PFedHNOptions,
    PFedHNPCOptions,
    PFedMeOptions,
)
from shared.methods import server_half
from shared.methods.base import ClientRecord
from shared.plan import (
    BUILT_IN_BACKBONES,
    MAX_IMAGE_VALUES,
    PRESETS,
    FederationPlan,
    ImagePlan,
    ModelPlan,
    Preset,
    parse_plan,
    read_stored_plan,
    validate_plan,
)
from shared.problems import PlanError
from shared.schemas import FederationPlanAnswer

MINIMAL = """
name = "birds"
classes = ["owl", "finch"]
"""
PAPER = 'preset = "paper"\n' + MINIMAL


def plan_data(**tables: Any) -> dict[str, Any]:
    return {"name": "birds", "classes": ["owl", "finch"], **tables}


def fault_lines(text_or_data: str | dict[str, Any]) -> dict[str, str]:
    """The faults of a plan by field."""
    with pytest.raises(PlanError) as caught:
        parse_plan(text_or_data) if isinstance(text_or_data, str) else validate_plan(text_or_data)
    head, *lines = str(caught.value).splitlines()
    assert head == ("The plan has a fault:" if len(lines) == 1 else f"The plan has {len(lines)} faults:")
    faults = dict(line.strip().split(": ", 1) for line in lines)
    assert len(faults) == len(lines)
    return faults


def as_toml(value: Any, path: str = "") -> str:
    """Enough of a TOML writer for plans."""
    plain, tables = [], []
    for key, item in value.items():
        if isinstance(item, dict):
            tables.append(f"[{path}{key}]\n" + as_toml(item, f"{path}{key}."))
        elif item is not None:
            plain.append(f"{key} = {json.dumps(item, ensure_ascii=False)}\n")
    return "".join(plain + tables)


class TestDefaults:
    def test_of_the_paper(self) -> None:
        plan = parse_plan(PAPER)
        method = plan.method
        assert isinstance(method, DistransOptions)
        assert (method.alpha, method.effective_offset_lr, method.dh_threshold) == (0.3, 1e-3, 0.5)
        assert (method.update_rule, method.offset_optimizer) == ("alternating", "sgd")
        assert (method.offset_init, method.offset_aggregation) == ("uniform", "auto")
        assert (method.shared_offset, method.offset_gradient) == (False, "mean")
        training = plan.training
        assert (training.lr, training.epochs, training.batch_size) == (5e-3, 1, 32)
        assert (training.momentum, training.weight_decay, training.clip_norm) == (0, 0, None)
        assert plan.averaging == "uniform"
        assert (plan.model.backbone, plan.model.activation) == ("lenet", "none")
        assert (plan.model.dense_dim, plan.model.weights) == (None, "random")
        assert plan.image.shape == (3, 64, 64)
        assert plan.rounds.sample_fraction == 1

    def test_of_the_paper_s_aggregation_network(self) -> None:
        method = parse_plan(PAPER).method
        assert isinstance(method, DistransOptions)
        generator = method.generator
        assert (generator.inputs, generator.optimizer, generator.lr) == ("embedding", "sgd", 1e-2)
        assert (generator.steps, generator.reduction, generator.mix) == (1, "mean", 1)

    @pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 1e-3), ("adam", 0.05), ("sign-sgd", 0.02)])
    def test_offset_rate_follows_its_optimizer(self, optimizer: str, rate: float) -> None:
        method = validate_plan(plan_data(method={"offset_optimizer": optimizer})).method
        assert isinstance(method, DistransOptions)
        assert method.effective_offset_lr == rate

    @pytest.mark.parametrize("rate", [0.0, 0.7])
    def test_offset_rate_of_the_plan_wins(self, rate: float) -> None:
        method = validate_plan(plan_data(method={"offset_optimizer": "adam", "offset_lr": rate})).method
        assert isinstance(method, DistransOptions)
        assert method.effective_offset_lr == rate


class TestPresets:
    def test_learned_offset_is_the_default(self) -> None:
        assert parse_plan(MINIMAL) == parse_plan('preset = "learned-offset"\n' + MINIMAL)

    def test_the_plan_wins_over_the_preset(self) -> None:
        assert parse_plan(PAPER + '[model]\nactivation = "relu"').model.activation == "relu"

    def test_a_preset_fills_the_rest_of_a_table(self) -> None:
        plan = parse_plan(PAPER + "[model]\ndense_dim = 256")
        assert (plan.model.activation, plan.model.dense_dim) == ("none", 256)

    def test_learned_offset(self) -> None:
        plan = parse_plan('preset = "learned-offset"\n' + MINIMAL)
        assert isinstance(plan.method, DistransOptions)
        assert (plan.method.offset_optimizer, plan.method.effective_offset_lr) == ("adam", 0.05)
        assert (plan.method.offset_init, plan.method.alpha) == ("zeros", 0.3)
        assert (plan.method.offset_bound, plan.method.bounded_clients) == (0.3, "single-class")
        same = [ClientRecord(name, (5, 5)) for name in "ab"]  # DH 0 %
        assert server_half(plan).facts(same) == {"offset_aggregation": "none"}
        assert plan.model.activation == "relu"

    def test_learned_offset_with_other_settings(self) -> None:
        plan = parse_plan('preset = "learned-offset"\n' + MINIMAL + "[method]\nalpha = 0.1\noffset_lr = 0.2")
        assert isinstance(plan.method, DistransOptions)
        assert (plan.method.alpha, plan.method.offset_optimizer, plan.method.offset_lr) == (0.1, "adam", 0.2)

    @pytest.mark.parametrize("preset", ["paper", "learned-offset"])
    def test_fedavg_takes_nothing_from_a_preset_about_offsets(self, preset: str) -> None:
        plan = parse_plan(f'preset = "{preset}"\n' + MINIMAL + '[method]\nname = "fedavg"')
        assert plan.method == FedAvgOptions()

    @pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("-official")])
    def test_of_another_method_s_authors(self, preset: str) -> None:
        plan = parse_plan(f'preset = "{preset}"\n' + MINIMAL)
        assert plan.method.name == preset.removesuffix("-official")
        assert plan.model.activation == "relu"
        other = parse_plan(f'preset = "{preset}"\n' + MINIMAL + '[method]\nname = "fedavg"')
        assert (other.method, other.training) == (FedAvgOptions(), plan.training)

    def test_every_preset_can_be_named(self) -> None:
        assert set(get_args(Preset)) == set(PRESETS)

    def test_the_plan_s_own_settings_win_over_another_method_s_authors(self) -> None:
        plan = parse_plan('preset = "moon-official"\n' + MINIMAL + "[method]\nmu = 1\n[training]\nepochs = 2")
        assert isinstance(plan.method, MoonOptions)
        assert (plan.method.mu, plan.training.epochs, plan.training.lr) == (1, 2, 0.01)

    def test_a_stored_plan_takes_nothing_from_its_preset(self) -> None:
        """A preset may say more by now than it did when the plan was made."""
        stored = json.loads(parse_plan(MINIMAL).model_dump_json())
        del stored["method"]["offset_bound"]
        plan = read_stored_plan(json.dumps(stored))
        assert isinstance(plan.method, DistransOptions)
        assert (plan.preset, plan.method.offset_bound, plan.method.offset_init) == ("learned-offset", None, "zeros")
        assert read_stored_plan(parse_plan(PAPER).model_dump_json()) == parse_plan(PAPER)
        told = FederationPlanAnswer.model_validate_json(json.dumps({"federation": "birds", "plan": stored}))
        assert told.plan == plan

    def test_unknown_preset(self) -> None:
        assert "paper" in fault_lines('preset = "papier"\n' + MINIMAL)["preset"]


class TestOtherMethods:
    def test_defaults_of_pfedme(self) -> None:
        method = PFedMeOptions()
        assert (method.personal_lr, method.attraction, method.inner_steps) == (0.01, 15, 5)
        assert (method.server_mix, method.decay, method.predict) == (1, 1e-3, "personal")

    def test_defaults_of_pfedhn(self) -> None:
        whole, personal = PFedHNOptions(), PFedHNPCOptions()
        assert (whole.lr, personal.lr) == (1e-2, 5e-2)
        for method in (whole, personal):
            assert (method.hidden, method.hidden_layers, method.clip_norm) == (100, 3, 50)
            assert (method.momentum, method.weight_decay, method.embedding_lr) == (0.9, 1e-3, None)

    def test_defaults_of_the_others(self) -> None:
        moon, rows = MoonOptions(), FedAwSOptions()
        assert (moon.mu, moon.temperature, moon.projection_dim, moon.previous_models) == (1, 0.5, 256, 1)
        assert (rows.margin, rows.spread_margin, rows.spread, rows.spread_steps) == (0.9, 0.9, 10, 1)
        assert MixupOptions().alpha == 1
        attack = AdvPropOptions()
        assert (attack.epsilon, attack.iterations, attack.targeted, attack.random_start) == (1, 1, False, True)

    @pytest.mark.parametrize("setting", ["momentum", "weight_decay"])
    def test_pfedme_has_no_optimiser_settings_that_it_would_not_use(self, setting: str) -> None:
        faults = fault_lines(plan_data(method={"name": "pfedme"}, training={setting: 0.1}))
        assert "pfedme has neither" in faults["plan"]

    @pytest.mark.parametrize("name", ["pfedhn", "pfedhn-pc"])
    def test_a_hypernetwork_takes_no_given_weights(self, name: str) -> None:
        faults = fault_lines(plan_data(method={"name": name}, model={"weights": "file"}))
        assert "cannot start from given weights" in faults["plan"]

    def test_options_of_one_method_are_unknown_to_another(self) -> None:
        faults = fault_lines(plan_data(method={"name": "moon", "alpha": 0.3}))
        assert faults["method.alpha"].startswith("unknown setting; known here: name, ")


class TestFaults:
    def test_all_at_once_by_field(self) -> None:
        faults = fault_lines(
            """
            name = "not a name"
            classes = ["owl"]
            seed = -1
            colour = "red"
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
        assert faults.keys() == {
            *("name", "classes", "seed", "colour", "averaging", "image.height", "model.backbone", "model.activation"),
            *("method.alpha", "method.beta", "method.generator.lr", "training.lr", "training.epochs"),
            *("rounds.quorum", "rounds.patience"),
            "image",  # its mean
        }
        assert all(faults.values())

    def test_fields_that_do_not_fit_each_other_are_named_beside_wrong_ones(self) -> None:
        with pytest.raises(PlanError) as caught:
            validate_plan(
                {
                    "classes": ["owl", 5],
                    "image": {"channels": 1, "height": 20, "mean": [1, 2], "std": [1, 2], "colour": "grey"},
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
            *("name: is missing", "classes.1: ", "image.colour: ", "method.alpha: ", "training.lr: "),
            *("image: mean has 2 values for 1 channels", "image: std has 2 values for 1 channels"),
            *("method: shared_offset = true", "plan: model.backbone: alexnet needs images of at least 63×63"),
            "plan: method.offset_init: ImageNet's statistics are for 3 channels",
        ]
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == len(wanted), lines
        for start in wanted:
            assert any(line.strip().startswith(start) for line in lines), start

    def test_a_rule_about_a_wrong_field_is_left_alone(self) -> None:
        assert fault_lines(plan_data(model={"backbone": "vgg"}, image={"height": 8})).keys() == {"model.backbone"}
        assert fault_lines(plan_data(model={"backbone": "alexnet"}, image={"height": -8})).keys() == {"image.height"}
        assert fault_lines(plan_data(image={"channels": "red", "mean": [1, 2]})).keys() == {"image.channels"}

    def test_missing_fields(self) -> None:
        assert fault_lines("") == {"name": "is missing", "classes": "is missing"}

    @pytest.mark.parametrize(
        "text",
        [
            "colour = 1\n" + MINIMAL,
            MINIMAL + "[image]\ncolour = 1",
            MINIMAL + "[model]\ncolour = 1",
            MINIMAL + "[method]\ncolour = 1",
            MINIMAL + '[method]\nname = "fedavg"\ncolour = 1',
            MINIMAL + "[method.generator]\ncolour = 1",
            MINIMAL + "[training]\ncolour = 1",
            MINIMAL + "[rounds]\ncolour = 1",
        ],
    )
    def test_unknown_key(self, text: str) -> None:
        ((field, fault),) = fault_lines(text).items()
        assert field.endswith("colour")
        assert fault.startswith("unknown setting; known here: ")

    def test_a_key_of_another_method(self) -> None:
        faults = fault_lines(MINIMAL + '[method]\nname = "fedavg"\nalpha = 0.3')
        assert faults.keys() == {"method.alpha"}

    @pytest.mark.parametrize("text", ["name = ", "name 1", "[image", 'name = "a"\nname = "b"', "\0"])
    def test_invalid_toml(self, text: str) -> None:
        with pytest.raises(PlanError, match=r"not valid TOML: .*line \d|not valid TOML: .*end of document"):
            parse_plan(text)

    @pytest.mark.parametrize("method", ["fedavg", 3, [], {"name": "fedsgd"}, {"name": 7}, {"name": ["fedavg"]}])
    def test_unknown_method(self, method: Any) -> None:
        assert fault_lines(plan_data(method=method)).keys() == {"method"}

    @pytest.mark.parametrize("data", [{}, {"image": 3}, {"model": []}, {"rounds": "many"}])
    def test_tables_of_the_wrong_kind(self, data: dict[str, Any]) -> None:
        assert fault_lines(plan_data(**data, training=1)).keys() == {"training", *data}

    def test_a_plan_of_the_wrong_kind(self) -> None:
        with pytest.raises(PlanError, match="plan: must be a table, but is"):
            validate_plan([1, 2])  # type: ignore[arg-type]

    def test_repeated_classes(self) -> None:
        faults = fault_lines('name = "a"\nclasses = ["owl", "finch", " owl ", "rook", "finch"]')
        assert faults == {"classes": "each class may stand once; repeated: finch, owl"}

    @pytest.mark.parametrize("classes", [[], ["owl"], ["owl", ""], ["owl", "  "], ["owl", "x" * 129], "owl", [1, 2]])
    def test_bad_classes(self, classes: Any) -> None:
        fields = fault_lines({"name": "a", "classes": classes})
        assert {field.split(".")[0] for field in fields} == {"classes"}

    @pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "a\n", "é", "a" * 65])
    def test_bad_names(self, name: str) -> None:
        assert fault_lines({"name": name, "classes": ["a", "b"]}).keys() == {"name"}

    @pytest.mark.parametrize("backbone", BUILT_IN_BACKBONES)
    @pytest.mark.parametrize("narrow", ["height", "width"])
    def test_image_smaller_than_the_backbone_can_take(self, backbone: str, narrow: str) -> None:
        minimum = BUILT_IN_BACKBONES[backbone]
        sides = {"height": 70, "width": 70, narrow: minimum}
        assert validate_plan(plan_data(model={"backbone": backbone}, image=sides)).model.backbone == backbone
        if minimum > 1:
            faults = fault_lines(plan_data(model={"backbone": backbone}, image={**sides, narrow: minimum - 1}))
            assert f"{backbone} needs images of at least {minimum}×{minimum}" in faults["plan"]
            assert "model.backbone" in faults["plan"]
            assert str(minimum - 1) in faults["plan"]

    @pytest.mark.parametrize(
        "backbone", ["", "LeNet", "vgg", "a:", ":b", "a:b:c", "a-b:c", "1a:b", "a:1b", "a b:c", "a:b\n"]
    )
    def test_unknown_backbone(self, backbone: str) -> None:
        faults = fault_lines(plan_data(model={"backbone": backbone}))
        assert "lenet, alexnet, resnet18, resnet50" in faults["model.backbone"]

    @pytest.mark.parametrize("backbone", ["nets:small", "my.deep.package:build_net", "_a._b:_c"])
    def test_backbone_of_one_s_own(self, backbone: str) -> None:
        assert validate_plan(plan_data(model={"backbone": backbone})).model.backbone == backbone

    @pytest.mark.parametrize("backbone", ["lenet", "nets:small"])
    def test_no_imagenet_weights_for(self, backbone: str) -> None:
        faults = fault_lines(plan_data(model={"backbone": backbone, "weights": "imagenet"}))
        assert faults == {"model": f"there are no ImageNet weights for {backbone}"}

    @pytest.mark.parametrize("backbone", ["alexnet", "resnet18", "resnet50"])
    def test_imagenet_weights_for(self, backbone: str) -> None:
        assert validate_plan(plan_data(model={"backbone": backbone, "weights": "imagenet"})).model.weights == "imagenet"

    @pytest.mark.parametrize("aggregation", ["none", "network"])
    def test_one_offset_for_all_and_one_for_each(self, aggregation: str) -> None:
        faults = fault_lines(plan_data(method={"shared_offset": True, "offset_aggregation": aggregation}))
        assert f"offset_aggregation = '{aggregation}'" in faults["method"]
        assert "use 'auto' or 'mean'" in faults["method"]

    def test_one_offset_for_all_from_the_generator(self) -> None:
        faults = fault_lines(plan_data(method={"shared_offset": True, "offset_init": "generator"}))
        assert "cannot start from the generator" in faults["method"]

    @pytest.mark.parametrize("setting", [{"batchnorm": "separate"}, {"batchnorm": "joint"}, {"shared_dropout": True}])
    def test_one_input_channel_and_what_two_have_in_common(self, setting: dict[str, Any]) -> None:
        faults = fault_lines(plan_data(method={"input_channels": "single", **setting}))
        assert "leave them out with input_channels = 'single'" in faults["method"]

    def test_rows_that_are_withheld_and_trained(self) -> None:
        method = {"name": "fedaws", "client_loss": "cross-entropy", "evaluation_rows": False}
        assert "use 'hinge'" in fault_lines(plan_data(method=method))["method"]

    @pytest.mark.parametrize("aggregation", ["auto", "mean"])
    def test_one_offset_for_all(self, aggregation: str) -> None:
        plan = validate_plan(plan_data(method={"shared_offset": True, "offset_aggregation": aggregation}))
        assert isinstance(plan.method, DistransOptions)
        assert plan.method.shared_offset

    def test_imagenet_offsets_for_grey_images(self) -> None:
        faults = fault_lines(plan_data(method={"offset_init": "imagenet"}, image={"channels": 1}))
        assert "method.offset_init: ImageNet's statistics are for 3 channels" in faults["plan"]

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
    def test_numbers_that_are_not_finite(self, field: str, value: str) -> None:
        table, _, key = field.rpartition(".")
        assert fault_lines(MINIMAL + f"[{table}]\n{key} = {value}").keys() == {field}

    @pytest.mark.parametrize("statistic", ["mean", "std"])
    @pytest.mark.parametrize("value", ["nan", "inf"])
    def test_image_statistics_that_are_not_finite(self, statistic: str, value: str) -> None:
        assert fault_lines(MINIMAL + f"[image]\n{statistic} = [{value}]").keys() == {f"image.{statistic}.0"}

    @pytest.mark.parametrize("statistic", ["mean", "std"])
    def test_image_statistics_for_other_channels(self, statistic: str) -> None:
        faults = fault_lines(plan_data(image={statistic: [0.5, 0.5]}))
        assert faults == {"image": f"{statistic} has 2 values for 3 channels; give 1 or one each"}

    @pytest.mark.parametrize("std", [0, -0.5])
    def test_a_standard_deviation_that_is_not_positive(self, std: float) -> None:
        assert fault_lines(plan_data(image={"std": [std]})).keys() == {"image.std.0"}

    def test_an_image_too_large_to_be_sent_around(self) -> None:
        assert validate_plan(plan_data(image={"channels": 1, "height": 4096, "width": 4096})).image.channels == 1
        faults = fault_lines(plan_data(image={"channels": 2, "height": 4096, "width": 4096}))
        assert faults == {"image": f"an image may have at most {MAX_IMAGE_VALUES} values"}


plans = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z"),
        "classes": st.lists(
            st.text("aéß 日'\"\\#[]{}=", min_size=1, max_size=6).map(str.strip).filter(bool),
            min_size=2,
            max_size=5,
            unique=True,
        ),
    },
    optional={
        "preset": st.sampled_from(["paper", "learned-offset"]),
        "seed": st.integers(0, 2**63 - 1),
        "averaging": st.sampled_from(["uniform", "samples"]),
        "image": st.fixed_dictionaries(
            {}, optional={"height": st.integers(14, 99), "mean": st.lists(st.floats(0, 1), min_size=3, max_size=3)}
        ),
        "model": st.fixed_dictionaries(
            {}, optional={"activation": st.sampled_from(["none", "relu"]), "dense_dim": st.integers(1, 500)}
        ),
        "method": st.just({"name": "fedavg"})
        | st.fixed_dictionaries(
            {},
            optional={
                "alpha": st.floats(0, 1),
                "offset_lr": st.floats(0, 1),
                "offset_optimizer": st.sampled_from(["sgd", "adam", "sign-sgd"]),
                "generator": st.fixed_dictionaries({}, optional={"mix": st.floats(0, 1)}),
            },
        ),
        "training": st.fixed_dictionaries({}, optional={"lr": st.floats(0, 100), "clip_norm": st.floats(0.1, 9)}),
        "rounds": st.fixed_dictionaries({}, optional={"patience": st.integers(1, 9)}),
    },
)


class TestForms:
    @given(plans)
    def test_json_and_back(self, data: dict[str, Any]) -> None:
        plan = validate_plan(data)
        assert FederationPlan.model_validate_json(plan.model_dump_json()) == plan
        assert validate_plan(json.loads(plan.model_dump_json())) == plan

    @given(plans)
    def test_toml_and_back(self, data: dict[str, Any]) -> None:
        plan = validate_plan(data)
        assert parse_plan(as_toml(data)) == plan
        assert parse_plan(as_toml(plan.model_dump(mode="json"))) == plan

    @given(plans)
    def test_what_the_plan_says_is_what_it_has(self, data: dict[str, Any]) -> None:
        def contains(found: Any, said: Any) -> bool:
            if isinstance(said, dict):
                return all(contains(found[key], value) for key, value in said.items())
            return bool(found == said)

        assert contains(validate_plan(data).model_dump(mode="json"), data)

    def test_the_caller_s_data_stay_as_they_are(self) -> None:
        data = plan_data(preset="learned-offset", method={"alpha": 0.1}, model={})
        before = json.dumps(data)
        validate_plan(data)
        assert json.dumps(data) == before

    @pytest.mark.parametrize(
        ("table", "field"),
        [(None, "name"), ("image", "height"), ("model", "backbone"), ("method", "alpha"), ("training", "lr")],
    )
    def test_frozen(self, table: str | None, field: str) -> None:
        plan = parse_plan(MINIMAL)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(getattr(plan, table) if table else plan, field, 1)
        assert plan == parse_plan(MINIMAL)

    def test_reading_a_plan_does_not_load_torch(self) -> None:
        code = "import sys, shared.plan; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


_KEYS = st.sampled_from(
    [*FederationPlan.model_fields, *ImagePlan.model_fields, *ModelPlan.model_fields, *DistransOptions.model_fields]
)
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(_KEYS, _JUNK, max_size=6))
def test_any_data_is_a_plan_or_has_faults(data: dict[str, Any]) -> None:
    with contextlib.suppress(PlanError):
        validate_plan(data)
