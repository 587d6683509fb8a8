"""Alone: the site's own model, trained without the federation, to compare with and to serve if it is better."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from shared.contract.errors import DistransError
from shared.contract.method_options import FedAvgOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods import client_half, server_half
from shared.learning.methods.base import BatchProgress, Predictor, RoundTask, TrainingContext, TrainingInterrupted
from shared.learning.methods.modules import detached_state, load_weights
from shared.learning.methods.tensor_half import TensorHalf
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, count_steps, plain_step
from shared.learning.model import build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors


class LocalBaseline:
    """A single-channel model trained only on this site's data, for as many steps as the federation's."""

    def __init__(self, plan: FederationPlan, name: str) -> None:
        self._plan = plan.model_copy(update={"method": FedAvgOptions()})
        self._name = name

    def start(self, first_model: Tensors | None = None) -> Tensors:
        """Return the weights to start from: the plan's random ones, as far as the federation's model 0 has no others.

        It has if the plan starts from pretrained weights.
        """
        weights = TensorHalf(server_half(self._plan)).initial_state().shared
        if self._plan.model.weights == "random" or first_model is None:
            return weights
        fitting = {
            name: value
            for name, value in first_model.items()
            if name in weights and value.shape == weights[name].shape and not name.startswith("logits.")
        }
        return weights | fitting

    def train(self, weights: Tensors, round_number: int, context: TrainingContext) -> Tensors:
        """Return the weights after one more round of local steps; without weights, start from the initial ones."""
        start = weights or self.start()
        update, _ = client_half(self._plan).train(RoundTask(self._name, round_number, start, {}), {}, context)
        return update.shared

    def steps_per_round(self, images: int) -> int:
        """Return how many steps a round of local training takes."""
        return count_steps(self._outline, self._plan.training, images)

    @cached_property
    def _outline(self) -> nn.Module:
        """The network without memory for its weights."""
        with torch.device("meta"):
            return build_single(self._plan)

    def advance(
        self, weights: Tensors, taken: int, steps: int, context: TrainingContext, is_time_up: Callable[[], bool]
    ) -> tuple[Tensors, int]:
        """Return the weights after up to `steps` more steps, and how many there were when time was up.

        `taken` steps came before. Raises TrainingInterrupted only if not a single step was taken.
        """
        runtime, done = context.runtime, 0

        def count(progress: BatchProgress) -> None:
            nonlocal done
            done = progress.batch

        net = runtime.prepare(load_weights(build_single(self._plan), weights)).train()
        watched = replace(context, on_batch=count, should_stop=lambda: context.should_stop() or is_time_up())
        # The number of steps stands in for the round: every stretch of training shuffles differently.
        training = LocalTraining(self._plan, RoundTask(self._name, taken, {}, {}), watched)
        try:
            training.run(net, plain_step(net, ModelStepper(net, self._plan, runtime), runtime), steps=steps)
        except TrainingInterrupted:
            if not done:
                raise
        trained = detached_state(net)
        if not all(bool(value.isfinite().all()) for value in trained.values()):
            raise DistransError("Training diverged: the weights are not finite.")
        return trained, done

    def predictor(self, weights: Tensors, runtime: Runtime) -> Predictor:
        """Return a predictor with these weights."""
        return client_half(self._plan).predictor(RoundTask(self._name, 0, weights, {}), {}, runtime)
