"""DisTrans: a shared double-channel model and one offset per client, trained jointly at the client.

Under aggregation `none`, a client's offset is private: it stays at the agent, and the coordinator only sends the seeded
initial offset. With `offset_backup` the coordinator also keeps a copy for agents that lose their state. Under `mean`
and `network`, clients upload their offsets and replace them with what the coordinator sends back.
"""

import torch
from torch import Tensor
from typing_extensions import override

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    ClientHalf,
    LocalData,
    Predictor,
    RoundTask,
    TrainingContext,
    Update,
    options_of,
)
from shared.learning.methods.distrans_server import AGGREGATION, is_offset_uploaded
from shared.learning.methods.modules import (
    ModulePredictor,
    buffers_of,
    detached_state,
    load_weights,
    parameters_of,
)
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, mean_loss
from shared.learning.model import DoubleChannelModel, build_double, frozen_statistics
from shared.learning.offsets import relative_motion
from shared.learning.runtime import Runtime
from shared.learning.site_prior import site_prior_shift
from shared.tensors.names import Tensors, add_prefix, strip_prefix

_BUFFERS = "buffers."


def build_network(plan: FederationPlan, options: DistransOptions) -> DoubleChannelModel:
    """Return the network with seeded random weights."""
    return build_double(plan, options.alpha, options.batchnorm, options.shared_dropout, options.input_channels)


class DistransClient(ClientHalf):
    """Algorithm 1, run by the client."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, DistransOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime = context.runtime
        net = load_weights(build_network(self.plan, self.options), task.shared | strip_prefix(private, _BUFFERS))
        net = runtime.prepare(net).train()
        start = current_offset(task, private)
        first = private.get("initial_offset", task.personal.get("initial_offset", start))
        offset = start.to(runtime.device).clone().requires_grad_()
        shift = site_prior_shift(self.plan, task, context.data) if self.options.offset_loss == "prior" else None
        stepper = OffsetStepper(net, offset, self.plan, self.options, runtime, shift)
        aggregated = task.facts[AGGREGATION] != "none"
        center = start if aggregated else private.get("bound_centre", first)
        if self._is_bounded(context.data):
            stepper.bound_around(center)
        report = LocalTraining(self.plan, task, context).run(net, stepper.step)
        trained = offset.detach().cpu()
        report = report.model_copy(update={"offset_motion": relative_motion(trained, first)})
        uploaded = {"offset": trained} if is_offset_uploaded(task.facts, self.options) else {}
        kept = {"offset": trained, "initial_offset": first}
        if self.options.offset_bound is not None:
            kept["bound_centre"] = center.clone()  # safetensors cannot store one tensor under two names
        if self.options.batchnorm_statistics == "averaged":
            return Update(detached_state(net), uploaded, report), kept
        return Update(parameters_of(net), uploaded, report), kept | add_prefix(buffers_of(net), _BUFFERS)

    def _is_bounded(self, data: LocalData) -> bool:
        if self.options.offset_bound is None or self.options.bounded_clients == "none":
            return False
        return self.options.bounded_clients == "all" or len(data.labels.unique()) == 1

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        net = load_weights(build_network(self.plan, self.options), task.shared | strip_prefix(private, _BUFFERS))
        if not use_offset:
            net.alpha = 0.0  # both channels see the unmodified image
        return ModulePredictor(net, runtime, current_offset(task, private))

    @override
    def offset(self, task: RoundTask, private: Tensors) -> Tensor | None:
        return current_offset(task, private)


def current_offset(task: RoundTask, private: Tensors) -> Tensor:
    """Return the coordinator's offset if it aggregates them; else the agent's own, its backup or the initial one."""
    for tensors, name in ((task.personal, "offset"), (private, "offset"), (task.personal, "offset_backup")):
        if name in tensors:
            return tensors[name]
    return task.personal["initial_offset"]


class OffsetStepper:
    """Optimizes model and offset jointly, batch by batch, by the plan's update rule."""

    def __init__(
        self,
        net: DoubleChannelModel,
        offset: Tensor,
        plan: FederationPlan,
        options: DistransOptions,
        runtime: Runtime,
        prior_shift: Tensor | None = None,
    ) -> None:
        """`prior_shift` is added to the logits in the offset's loss, so that the offset need not learn the prior."""
        self._net, self._offset, self._options, self._runtime = net, offset, options, runtime
        self._prior_shift = None if prior_shift is None else prior_shift.to(runtime.device)
        self._forward = runtime.forward_of(net)
        self._model = ModelStepper(net, plan, runtime)
        self._frozen = options.effective_offset_lr == 0 or options.alpha == 0
        optimizer = torch.optim.Adam if options.offset_optimizer == "adam" else torch.optim.SGD
        self._optimizer = optimizer([offset], lr=options.effective_offset_lr)
        self._limits: tuple[Tensor, Tensor] | None = None

    def bound_around(self, center: Tensor) -> None:
        """Keep every value of the offset within the plan's bound around `center` from now on."""
        center, bound = center.to(self._offset.device), self._options.offset_bound
        if bound is not None:
            self._limits = center - bound, center + bound

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Update offset and model; return the logits and loss of the model's step."""
        if self._frozen:
            return self._step_model(x, y, self._offset.detach())
        scale = self._model.loss_scale
        if self._options.update_rule == "joint":
            self._offset.grad = torch.zeros_like(self._offset)
            result = self._step_model(x, y, self._offset)
            self._step_offset(self._offset.grad, scale, len(y))
            return result
        # The offset's step does not change the weights, so both passes share what depends only on the images.
        # A compiled pass accepts only leaves of the graph and recomputes it.
        with self._runtime.autocast():
            image_term = None if self._runtime.compile else self._net.image_term(x)
        with frozen_statistics(self._net):
            logits = self._logits(x, self._offset, None if image_term is None else image_term.detach())
            loss = mean_loss(logits if self._prior_shift is None else logits.float() + self._prior_shift, y)
            # Ask only for the offset's gradient, so that none are computed for the weights.
            (gradient,) = torch.autograd.grad(loss * scale, [self._offset])
        self._step_offset(gradient, scale, len(y))
        # Drawn only if needed: without dropout, the random numbers are those of earlier releases.
        if self._options.offset_dropout == 0 or float(torch.rand(())) >= self._options.offset_dropout:
            return self._step_model(x, y, self._offset.detach(), image_term)
        with self._net.blending(0.0):
            return self._step_model(x, y, self._offset.detach(), image_term)

    def _logits(self, x: Tensor, offset: Tensor, image_term: Tensor | None = None) -> Tensor:
        with self._runtime.autocast():
            return self._forward(x, offset, image_term)

    def _step_model(
        self, x: Tensor, y: Tensor, offset: Tensor, image_term: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self._logits(x, offset, image_term)
        loss = mean_loss(logits, y)
        self._model.step(loss)
        return logits.detach(), loss.detach()

    def _step_offset(self, gradient: Tensor, scale: float, batch: int) -> None:
        if scale != 1:
            gradient = gradient / scale
            if not bool(gradient.isfinite().all()):
                return  # fp16 overflow; the scaler lowers its scale for the next batch
        if self._options.offset_gradient == "sum":
            gradient = gradient * batch
        self._offset.grad = gradient.sign() if self._options.offset_optimizer == "sign-sgd" else gradient
        self._optimizer.step()
        self._offset.grad = None
        if self._limits is not None:
            self._offset.data.clamp_(*self._limits)
