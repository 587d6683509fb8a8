import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.plan_texts import MINIMAL, PAPER, plan_data

from shared.contract.method_options import (
    AdvPropOptions,
    DistransOptions,
    FedAwSOptions,
    MixupOptions,
    MoonOptions,
    PFedHNOptions,
    PFedHNPCOptions,
    PFedMeOptions,
)
from shared.contract.plan import FederationPlan, parse_plan, settings_to_hide, validate_plan


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
    def test_paper_preset_has_the_published_settings(self) -> None:
        plan = parse_plan(PAPER)
        method = plan.method
        assert isinstance(method, DistransOptions)
        assert (method.alpha, method.effective_offset_lr, method.dh_threshold) == (0.3, 1e-3, 0.5)
        assert (method.update_rule, method.offset_optimizer) == ("alternating", "sgd")
        assert (method.offset_init, method.offset_aggregation) == ("auto", "auto")
        assert (method.shared_offset, method.offset_gradient) == (False, "mean")
        training = plan.training
        assert (training.lr, training.epochs, training.batch_size) == (5e-3, 1, 32)
        assert (training.momentum, training.weight_decay, training.clip_norm) == (0, 0, None)
        assert plan.averaging == "uniform"
        assert (plan.model.backbone, plan.model.activation) == ("lenet", "none")
        assert plan.model.initialization == "kaiming"
        assert (plan.model.dense_dim, plan.model.weights) == (None, "random")
        assert plan.image.shape == (3, 64, 64)
        assert plan.rounds.sample_fraction == 1

    def test_paper_preset_has_the_published_aggregation_network(self) -> None:
        method = parse_plan(PAPER).method
        assert isinstance(method, DistransOptions)
        generator = method.generator
        assert (generator.inputs, generator.optimizer, generator.lr) == ("embedding", "sgd", 1e-2)
        assert (generator.steps, generator.reduction, generator.mix) == (1, "mean", 1)

    @pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 1e-3), ("adam", 0.05), ("sign-sgd", 0.02)])
    def test_default_offset_rate_depends_on_the_optimizer(self, optimizer: str, rate: float) -> None:
        method = validate_plan(plan_data(method={"offset_optimizer": optimizer})).method
        assert isinstance(method, DistransOptions)
        assert method.effective_offset_lr == rate

    @pytest.mark.parametrize("rate", [0.0, 0.7])
    def test_offset_rate_in_the_plan_overrides_the_default(self, rate: float) -> None:
        method = validate_plan(plan_data(method={"offset_optimizer": "adam", "offset_lr": rate})).method
        assert isinstance(method, DistransOptions)
        assert method.effective_offset_lr == rate

    def test_pfedme_has_the_published_defaults(self) -> None:
        method = PFedMeOptions()
        assert (method.personal_lr, method.attraction, method.inner_steps) == (0.01, 15, 5)
        assert (method.server_mix, method.decay, method.predict) == (1, 1e-3, "personal")

    def test_pfedhn_has_the_published_defaults(self) -> None:
        whole, personal = PFedHNOptions(), PFedHNPCOptions()
        assert (whole.lr, personal.lr) == (1e-2, 5e-2)
        for method in (whole, personal):
            assert (method.hidden, method.hidden_layers, method.clip_norm) == (100, 3, 50)
            assert (method.momentum, method.weight_decay, method.embedding_lr) == (0.9, 1e-3, None)

    def test_other_methods_have_the_published_defaults(self) -> None:
        moon, rows = MoonOptions(), FedAwSOptions()
        assert (moon.mu, moon.temperature, moon.projection_dim, moon.previous_models) == (1, 0.5, 256, 1)
        assert (rows.margin, rows.spread_margin, rows.spread, rows.spread_steps) == (0.9, 0.9, 10, 1)
        assert MixupOptions().alpha == 1
        attack = AdvPropOptions()
        assert (attack.epsilon, attack.iterations, attack.targeted, attack.random_start) == (1, 1, False, True)


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
        "preset": st.sampled_from(["paper", "learned-offset", "offset-dropout"]),
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
    def test_json_round_trip_preserves_the_plan(self, data: dict[str, Any]) -> None:
        plan = validate_plan(data)
        assert FederationPlan.model_validate_json(plan.model_dump_json()) == plan
        assert validate_plan(json.loads(plan.model_dump_json())) == plan

    @given(plans)
    def test_toml_round_trip_preserves_the_plan(self, data: dict[str, Any]) -> None:
        plan = validate_plan(data)
        assert parse_plan(as_toml(data)) == plan
        assert parse_plan(as_toml(plan.model_dump(mode="json"))) == plan

    @given(plans)
    def test_explicit_settings_are_never_overridden(self, data: dict[str, Any]) -> None:
        def contains(found: Any, said: Any) -> bool:
            if isinstance(said, dict):
                return all(contains(found[key], value) for key, value in said.items())
            return bool(found == said)

        assert contains(validate_plan(data).model_dump(mode="json"), data)

    def test_validation_does_not_modify_the_data(self) -> None:
        data = plan_data(preset="learned-offset", method={"alpha": 0.1}, model={})
        before = json.dumps(data)
        validate_plan(data)
        assert json.dumps(data) == before

    @pytest.mark.parametrize(
        ("table", "field"),
        [(None, "name"), ("image", "height"), ("model", "backbone"), ("method", "alpha"), ("training", "lr")],
    )
    def test_plan_is_immutable(self, table: str | None, field: str) -> None:
        plan = parse_plan(MINIMAL)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(getattr(plan, table) if table else plan, field, 1)
        assert plan == parse_plan(MINIMAL)


class TestClassCounts:
    def test_may_be_withheld_by_default(self) -> None:
        assert parse_plan(MINIMAL).counts_needed_by is None

    @pytest.mark.parametrize(
        ("settings", "setting"),
        [
            ({"averaging": "samples"}, "averaging = 'samples'"),
            ({"method": {"name": "fedaws", "client_loss": "hinge"}}, "method.client_loss = 'hinge'"),
            ({"method": {"name": "fedaws", "client_loss": "cross-entropy"}}, None),
        ],
    )
    def test_are_needed_by_some_settings(self, settings: dict[str, Any], setting: str | None) -> None:
        assert validate_plan(plan_data(**settings)).counts_needed_by == setting


class TestOlderAgents:
    def test_are_not_shown_settings_they_do_not_know(self) -> None:
        plan = validate_plan(plan_data(method={"name": "distrans", "offset_dropout": 0.0, "offset_loss": "prior"}))
        assert settings_to_hide(plan, 3) == {}
        assert settings_to_hide(plan, 2) == {"training": {"update_compression"}}
        compressed = validate_plan(plan_data(training={"update_compression": "int8"}))
        assert settings_to_hide(compressed, 2) == {}, "an agent that cannot compress must not join"
        assert settings_to_hide(plan, 1)["method"] == {"offset_dropout"}, "offset_loss makes a difference"
        assert settings_to_hide(plan, 0)["rounds"] == {"absent_after_s"}

    def test_may_train_by_methods_without_those_settings(self) -> None:
        assert "method" not in settings_to_hide(validate_plan(plan_data(method={"name": "fedavg"})), 1)
