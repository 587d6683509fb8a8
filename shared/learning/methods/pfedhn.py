"""pFedHN and pFedHN-PC: a hypernetwork at the coordinator generates each client's model.

The coordinator sends θ_i = h(v_i), the client trains it and uploads Δ_i = θ_i − trained θ_i, and the hypernetwork
steps along Jᵀ Δ_i. Nothing is averaged; the shared tensors are the initial buffers of every client's network, and
each client keeps its own afterward. Clients predict with the generated θ_i, not with the trained one.

In pFedHN-PC the logits layer is personal: it stays at the agent, along with its optimizer's momentum.
"""

import logging
from collections.abc import Sequence

import torch
from typing_extensions import override

from shared.contract.errors import PlanError, WeightsError
from shared.contract.method_options import HypernetworkOptions, PFedHNPCOptions
from shared.contract.plan import FederationPlan
from shared.learning.hypernetwork import Hypernetwork
from shared.learning.methods.base import (
    ClientHalf,
    ClientRecord,
    Facts,
    PersonalUploads,
    Predictor,
    RoundContext,
    RoundTask,
    ServerHalf,
    ServerState,
    TrainingContext,
    Update,
    options_of,
)
from shared.learning.methods.modules import ModulePredictor, buffers_of, load_weights, parameters_of
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, make_sgd, plain_step
from shared.learning.model import SingleChannelModel, build_single
from shared.learning.runtime import Runtime
from shared.tensors.names import PERSONAL, Tensors, add_prefix, strip_prefix
from shared.tensors.spec import Spec

MAX_HYPERNETWORK_BYTES = 4 * 1024**3  # momentum takes as much again, and both are stored with every model
_MODEL, _DELTA = "model.", "delta."
_BUFFERS, _HEAD, _MOMENTUM = "buffers.", "head.", "momentum."
_logger = logging.getLogger(__name__)


def _is_generated(plan: FederationPlan, name: str) -> bool:
    """Return whether the hypernetwork generates this parameter."""
    return not (isinstance(plan.method, PFedHNPCOptions) and name.startswith("logits."))


class PFedHNServer(ServerHalf):
    """Trains the hypernetwork and the clients' embeddings."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        with torch.device("meta"):
            net = build_single(plan)
        parameters = dict(net.named_parameters())
        self._model_spec = Spec.of({name: value for name, value in net.state_dict().items() if name not in parameters})
        self._generated = {name: value for name, value in parameters.items() if _is_generated(plan, name)}
        shapes = {name: tuple(value.shape) for name, value in self._generated.items()}
        self.hypernetwork = Hypernetwork(shapes, options_of(plan, HypernetworkOptions), plan.seed)

    @override
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        if pretrained is not None:
            raise WeightsError(
                f"{self.plan.method.name} generates models with a hypernetwork, which cannot start from given weights.",
                next_step='Use model.weights = "random".',
            )
        size_bytes = self.hypernetwork.head_bytes
        if size_bytes > MAX_HYPERNETWORK_BYTES:
            raise PlanError(
                f"A hypernetwork for {self.plan.model.backbone} at this image size has {size_bytes / 1e9:.1f} GB of "
                f"weights; the limit is {MAX_HYPERNETWORK_BYTES / 1e9:.1f} GB.",
                next_step="Choose a smaller backbone, smaller images, or a smaller method.hidden.",
            )
        return ServerState(shared=buffers_of(build_single(self.plan)), private=self.hypernetwork.initial())

    @override
    def personal(self, state: ServerState, client: ClientRecord, round_: RoundContext) -> Tensors:
        """Return the client's model."""
        complete = self.hypernetwork.complete(state.private, _names(round_.roster, client))
        with torch.no_grad():
            return add_prefix(self.hypernetwork.generate(complete, client.id), _MODEL)

    @override
    def model_spec(self) -> Spec:
        return self._model_spec  # avoids building the hypernetwork, which may take gigabytes

    @override
    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        return [Spec.of(self._generated).prefixed(_MODEL)]

    @override
    def update_spec(self, facts: Facts) -> Spec:
        return Spec.of(self._generated).prefixed(PERSONAL + _DELTA)

    @override
    def finish(self, state: ServerState, mean: Tensors, uploads: PersonalUploads, round_: RoundContext) -> ServerState:
        complete = self.hypernetwork.complete(state.private, _names(round_.roster))
        deltas = ((client.id, strip_prefix(personal, _DELTA)) for client, personal in uploads)
        return ServerState(state.shared, self.hypernetwork.apply_updates(complete, deltas))


def _names(roster: Sequence[ClientRecord], *others: ClientRecord) -> list[str]:
    return sorted({client.id for client in [*roster, *others]})


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
        clipped = [parameter for name, parameter in net.named_parameters() if _is_generated(self.plan, name)]
        stepper = ModelStepper(net, self.plan, runtime, optimizer, clip_norm=options.clip_norm, clipped=clipped)
        report = LocalTraining(self.plan, task, context).run(
            net,
            plain_step(net, stepper, runtime),
            steps=options.inner_steps,
            reshuffle=options.inner_steps is not None,
        )
        after, before = parameters_of(net), strip_prefix(task.personal, _MODEL)
        delta = {name: before[name] - after[name] for name in before}
        kept = add_prefix(buffers_of(net), _BUFFERS)
        kept |= add_prefix({name: value for name, value in after.items() if name not in before}, _HEAD)
        for name, parameter in net.named_parameters():
            momentum = optimizer.state[parameter].get("momentum_buffer")
            if name not in before and momentum is not None:
                kept[_MOMENTUM + name] = momentum.cpu().contiguous()
        return Update({}, add_prefix(delta, _DELTA), report), kept

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(self._build(task, private), runtime)

    def _build(self, task: RoundTask, private: Tensors) -> SingleChannelModel:
        net = build_single(self.plan)
        tensors = {**task.shared, **strip_prefix(private, _BUFFERS), **strip_prefix(task.personal, _MODEL)}
        head = {name: value for name, value in parameters_of(net).items() if not _is_generated(self.plan, name)}
        return load_weights(net, {**head, **tensors, **strip_prefix(private, _HEAD)})
