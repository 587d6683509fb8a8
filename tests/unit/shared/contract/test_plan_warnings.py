import pytest
from support.plan_texts import plan_data

from shared.contract.plan import validate_plan
from shared.contract.plan_warnings import plan_warnings


def warnings_of(**tables: object) -> list[str]:
    return plan_warnings(validate_plan(plan_data(preset="paper", **tables)))


@pytest.mark.parametrize("backbone", ["alexnet", "resnet18", "resnet50"])
def test_paper_s_networks_from_imagenet_weights_give_no_warning(backbone: str) -> None:
    assert warnings_of(model={"backbone": backbone, "weights": "imagenet"}) == []


def test_weights_from_a_file_may_be_the_paper_s() -> None:
    assert warnings_of(model={"backbone": "alexnet", "weights": "file"}) == []


def test_other_network_is_named_with_the_paper_s() -> None:
    (lenet,) = warnings_of()
    assert lenet == (
        'preset = "paper" with model.backbone = "lenet": the paper uses LeNet for BioID only; do not expect its '
        'results. To compare with them: model.backbone = "alexnet" or "resnet18", and model.weights = "imagenet".'
    )
    (own,) = warnings_of(model={"backbone": "my_nets:build"})
    assert "my_nets:build" in own
    assert "other networks" in own


def test_random_weights_are_named_with_the_setting_to_change() -> None:
    (warning,) = warnings_of(model={"backbone": "resnet18"})
    assert "the paper's resnet18 starts from ImageNet weights" in warning
    assert warning.endswith('model.weights = "imagenet".')


def test_other_presets_and_methods_give_no_warning() -> None:
    assert plan_warnings(validate_plan(plan_data())) == []
    assert warnings_of(method={"name": "fedavg"}) == []
