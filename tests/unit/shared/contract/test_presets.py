import json
from typing import get_args

import pytest
from support.halves import server_half
from support.plan_texts import MINIMAL, PAPER, plan_errors

from shared.contract.messages import FederationPlanAnswer
from shared.contract.method_options import DistransOptions, FedAvgOptions, MoonOptions
from shared.contract.plan import parse_plan, read_stored_plan
from shared.contract.presets import PRESETS, Preset
from shared.learning.methods.base import ClientRecord


def test_offset_dropout_is_the_default() -> None:
    assert parse_plan(MINIMAL) == parse_plan('preset = "offset-dropout"\n' + MINIMAL)


def test_offset_dropout_is_learned_offset_with_dropout_and_the_prior() -> None:
    plan, learned = (parse_plan(f'preset = "{name}"\n' + MINIMAL) for name in ("offset-dropout", "learned-offset"))
    assert isinstance(learned.method, DistransOptions)
    assert plan.method == learned.method.model_copy(update={"offset_dropout": 0.5, "offset_loss": "prior"})


def test_default_training_settings_apply_to_other_methods_too() -> None:
    plan = parse_plan(MINIMAL + '[method]\nname = "fedavg"')
    assert (plan.method, plan.training) == (FedAvgOptions(), parse_plan(MINIMAL).training)


def test_plan_overrides_its_preset() -> None:
    assert parse_plan(PAPER + '[model]\nactivation = "relu"').model.activation == "relu"


def test_preset_fills_the_rest_of_a_table() -> None:
    plan = parse_plan(PAPER + "[model]\ndense_dim = 256")
    assert (plan.model.activation, plan.model.dense_dim) == ("none", 256)


def test_learned_offset_preset_trains_bounded_offsets_with_adam() -> None:
    plan = parse_plan('preset = "learned-offset"\n' + MINIMAL)
    assert isinstance(plan.method, DistransOptions)
    assert (plan.method.offset_optimizer, plan.method.effective_offset_lr) == ("adam", 0.05)
    assert (plan.method.offset_init, plan.method.alpha) == ("zeros", 0.3)
    assert (plan.method.offset_bound, plan.method.bounded_clients) == (0.3, "single-class")
    same = [ClientRecord(name, (5, 5)) for name in "ab"]  # DH 0 %
    assert server_half(plan).facts(same)["offset_aggregation"] == "none"
    assert (plan.model.activation, plan.model.initialization) == ("relu", "torch")


def test_plan_overrides_single_settings_of_learned_offset() -> None:
    plan = parse_plan('preset = "learned-offset"\n' + MINIMAL + "[method]\nalpha = 0.1\noffset_lr = 0.2")
    assert isinstance(plan.method, DistransOptions)
    assert (plan.method.alpha, plan.method.offset_optimizer, plan.method.offset_lr) == (0.1, "adam", 0.2)


@pytest.mark.parametrize("preset", ["paper", "learned-offset", "offset-dropout"])
def test_fedavg_ignores_offset_settings_of_a_preset(preset: str) -> None:
    plan = parse_plan(f'preset = "{preset}"\n' + MINIMAL + '[method]\nname = "fedavg"')
    assert plan.method == FedAvgOptions()


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("-official")])
def test_official_preset_selects_its_method_and_leaves_others_alone(preset: str) -> None:
    plan = parse_plan(f'preset = "{preset}"\n' + MINIMAL)
    assert plan.method.name == preset.removesuffix("-official")
    assert plan.model.activation == "relu"
    other = parse_plan(f'preset = "{preset}"\n' + MINIMAL + '[method]\nname = "fedavg"')
    assert (other.method, other.training) == (FedAvgOptions(), plan.training)


def test_preset_literal_lists_every_preset() -> None:
    assert set(get_args(Preset)) == set(PRESETS)


def test_plan_overrides_an_official_preset() -> None:
    plan = parse_plan('preset = "moon-official"\n' + MINIMAL + "[method]\nmu = 1\n[training]\nepochs = 2")
    assert isinstance(plan.method, MoonOptions)
    assert (plan.method.mu, plan.training.epochs, plan.training.lr) == (1, 2, 0.01)


def test_stored_plan_ignores_later_changes_to_its_preset() -> None:
    stored = json.loads(parse_plan(MINIMAL).model_dump_json())
    del stored["method"]["offset_bound"]
    plan = read_stored_plan(json.dumps(stored))
    assert isinstance(plan.method, DistransOptions)
    assert (plan.preset, plan.method.offset_bound, plan.method.offset_init) == ("offset-dropout", None, "zeros")
    assert read_stored_plan(parse_plan(PAPER).model_dump_json()) == parse_plan(PAPER)
    received = FederationPlanAnswer.model_validate_json(json.dumps({"federation": "birds", "plan": stored}))
    assert received.plan == plan


def test_plan_stored_before_the_authors_initial_values_keeps_its_own() -> None:
    stored = json.loads(parse_plan(PAPER).model_dump_json())
    del stored["model"]["initialization"]
    stored["method"]["offset_init"] = "uniform"  # the default then
    plan = read_stored_plan(json.dumps(stored))
    assert isinstance(plan.method, DistransOptions)
    assert (plan.preset, plan.model.initialization, plan.method.offset_init) == ("paper", "torch", "uniform")


def test_unknown_preset_is_answered_with_the_known_ones() -> None:
    assert "paper" in plan_errors('preset = "papier"\n' + MINIMAL)["preset"]
