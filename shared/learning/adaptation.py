"""Adaptation: a client's predicting model, fine-tuned on the client's own images."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from shared.learning.methods.base import BatchProgress, ClientHalf, RoundTask, TrainingContext
from shared.learning.methods.modules import ModulePredictor, detached_state, load_weights
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, Step, make_sgd, mean_loss
from shared.learning.runtime import Runtime
from shared.learning.site_prior import site_prior_shift
from shared.tensors.names import Tensors


def adapt(
    half: ClientHalf,
    task: RoundTask,
    private: Tensors,
    context: TrainingContext,
    *,
    epochs: int,
    head_only: bool = False,
    on_epoch: Callable[[int, Tensors], None] | None = None,
) -> Tensors | None:
    """Return the weights of the predicting model after more epochs here; None if the method's cannot be adapted.

    The offset stays as it is. The loss is adjusted by the client's prior, so that the logits still assume the
    federation's class frequencies, as those of the global model do. `on_epoch` gets the weights after each epoch with
    its number, from 1: what there is to use if the last one is interrupted.
    """
    predictor = half.predictor(task, private, context.runtime)
    if not half.can_adapt or not isinstance(predictor, ModulePredictor):
        return None
    net = predictor.net
    trained = net.get_submodule("logits") if head_only else net  # below the head, BatchNorm keeps its statistics
    trained.train().requires_grad_(True)
    plan = half.plan.model_copy(update={"training": half.plan.training.model_copy(update={"epochs": epochs})})
    stepper = ModelStepper(net, plan, context.runtime, make_sgd(trained, plan.training), clipped=trained.parameters())
    step = _step(net, predictor.extras, stepper, context.runtime, site_prior_shift(plan, task, context.data))

    def follow(progress: BatchProgress) -> None:
        if context.on_batch is not None:
            context.on_batch(progress)
        done, rest = divmod(progress.batch * epochs, progress.batches)
        if on_epoch is not None and not rest:
            on_epoch(done, detached_state(net))

    LocalTraining(plan, task, replace(context, on_batch=follow)).run(net, step)
    return detached_state(net)


def adapted_predictor(
    half: ClientHalf, task: RoundTask, private: Tensors, weights: Tensors, runtime: Runtime
) -> ModulePredictor:
    """Return the predictor with weights that `adapt` returned, and the same offset."""
    predictor = half.predictor(task, private, runtime)
    if not isinstance(predictor, ModulePredictor):
        raise TypeError(f"{half.plan.method.name} has no single network to adapt")
    return ModulePredictor(load_weights(predictor.net, weights), runtime, *predictor.extras)


def _step(net: nn.Module, extras: list[Tensor], stepper: ModelStepper, runtime: Runtime, shift: Tensor | None) -> Step:
    forward: Callable[..., Tensor] = runtime.forward_of(net)
    added = torch.zeros(()) if shift is None else shift

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with runtime.autocast():
            logits = forward(x, *extras)
        loss = mean_loss(logits.float() + added.to(logits.device), y)
        stepper.step(loss)
        return logits.detach(), loss.detach()

    return step
