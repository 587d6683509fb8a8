"""pFedHN and pFedHN-PC: a hypernetwork at the coordinator generates each client's model.

The coordinator sends θ_i = h(v_i), the client trains it and uploads Δ_i = θ_i − trained θ_i, and the hypernetwork
steps along Jᵀ Δ_i. Nothing is averaged; the shared tensors are the initial buffers of every client's network, and
each client keeps its own afterward. Clients predict with the generated θ_i, not with the trained one.

In pFedHN-PC the logits layer is personal: it stays at the agent, along with its optimizer's momentum.
"""

import logging

from typing_extensions import override

from shared.contract.method_options import HypernetworkOptions, PFedHNPCOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    ClientHalf,
    Predictor,
    RoundTask,
    TrainingContext,
    Update,
    options_of,
)
from shared.learning.methods.modules import ModulePredictor, buffers_of, load_weights, parameters_of
from shared.learning.methods.pfedhn_server import DELTA, MODEL, is_generated
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, make_sgd, plain_step
from shared.learning.model import SingleChannelModel, build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import Tensors, add_prefix, strip_prefix

_BUFFERS, _HEAD, _MOMENTUM = "buffers.", "head.", "momentum."
_logger = logging.getLogger(__name__)


class PFedHNClient(ClientHalf):
    """Trains the model it receives and uploads the change."""

    is_personal = True
    can_adapt = False  # it is trained on the client's images already

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, HypernetworkOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime, options = context.runtime, self.options
        if task.round > 1 and isinstance(options, PFedHNPCOptions) and not strip_prefix(private, _HEAD):
            _logger.info(
                "no stored logits layer found, starting with a new one; expected only in this site's first round"
            )
        net = runtime.prepare(self._build(task, private)).train()
        optimizer = make_sgd(net, self.plan.training)
        for name, parameter in net.named_parameters():
            if _MOMENTUM + name in private:
                optimizer.state[parameter]["momentum_buffer"] = private[_MOMENTUM + name].to(runtime.device).clone()
        clipped = [parameter for name, parameter in net.named_parameters() if is_generated(self.plan, name)]
        stepper = ModelStepper(net, self.plan, runtime, optimizer, clip_norm=options.clip_norm, clipped=clipped)
        report = LocalTraining(self.plan, task, context).run(
            net,
            plain_step(net, stepper, runtime),
            steps=options.inner_steps,
            reshuffle=options.inner_steps is not None,
        )
        after, before = parameters_of(net), strip_prefix(task.personal, MODEL)
        delta = {name: before[name] - after[name] for name in before}
        kept = add_prefix(buffers_of(net), _BUFFERS)
        kept |= add_prefix({name: value for name, value in after.items() if name not in before}, _HEAD)
        for name, parameter in net.named_parameters():
            momentum = optimizer.state[parameter].get("momentum_buffer")
            if name not in before and momentum is not None:
                kept[_MOMENTUM + name] = momentum.cpu().contiguous()
        return Update({}, add_prefix(delta, DELTA), report), kept

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(self._build(task, private), runtime)

    def _build(self, task: RoundTask, private: Tensors) -> SingleChannelModel:
        net = build_single(self.plan)
        tensors = {**task.shared, **strip_prefix(private, _BUFFERS), **strip_prefix(task.personal, MODEL)}
        head = {name: value for name, value in parameters_of(net).items() if not is_generated(self.plan, name)}
        return load_weights(net, {**head, **tensors, **strip_prefix(private, _HEAD)})
