"""Warnings about plans that are valid, but may not be what their author expects."""

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan

_PAPER_BACKBONES = ("alexnet", "resnet18", "resnet50")


def plan_warnings(plan: FederationPlan) -> list[str]:
    """Return what differs from the paper in a plan with its preset; for DisTrans only, because the paper does not say
    what its other methods start from.
    """
    if plan.preset != "paper" or not isinstance(plan.method, DistransOptions):
        return []
    model = plan.model
    if model.backbone not in _PAPER_BACKBONES:
        used = "LeNet for BioID only" if model.backbone == "lenet" else "other networks"
        return [
            f'preset = "paper" with model.backbone = "{model.backbone}": the paper uses {used}; do not expect its '
            'results. To compare with them: model.backbone = "alexnet" or "resnet18", and model.weights = "imagenet".'
        ]
    if model.weights == "random":
        return [
            f'preset = "paper" with model.weights = "random": the paper\'s {model.backbone} starts from ImageNet '
            'weights; do not expect its results. To compare with them: model.weights = "imagenet".'
        ]
    return []
