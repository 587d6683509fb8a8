"""Base models: the predictors that candidates are made of."""

from collections.abc import Mapping

from client_agent.serving.baseline import LocalBaseline
from client_agent.serving.candidates import Base
from client_agent.state.kept_models import Bundle
from shared.contract.plan import FederationPlan
from shared.learning.adaptation import adapted_predictor
from shared.learning.methods import client_half
from shared.learning.methods.base import Predictor
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors


def federated_bases(plan: FederationPlan, name: str, bundle: Bundle) -> list[Base]:
    """Return the base models that a bundle consists of: a personal one, a global one, or a global one and its offset.

    The last one is the model as it was trained.
    """
    half = client_half(plan)
    if half.is_personal:
        return [Base.PERSONAL]
    return [Base.GLOBAL] if half.offset(bundle.task(name), bundle.private) is None else [Base.GLOBAL, Base.OFFSET]


def build_base(
    base: Base, plan: FederationPlan, name: str, bundle: Bundle, own: Mapping[str, Tensors], runtime: Runtime
) -> Predictor:
    """Return a base model's predictor; `own` has the weights of adapted and alone."""
    if base is Base.ALONE:
        return LocalBaseline(plan, name).predictor(own[base], runtime)
    half, task = client_half(plan), bundle.task(name)
    if base is Base.ADAPTED:
        return adapted_predictor(half, task, bundle.private, own[base], runtime)
    return half.predictor(task, bundle.private, runtime, use_offset=base is not Base.GLOBAL)
