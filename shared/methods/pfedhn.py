"""pFedHN and pFedHN-PC: a hypernetwork at the coordinator makes each client's model.

The coordinator sends θ_i = h(v_i), the client trains it and uploads Δ_i = θ_i − trained θ_i, and the hypernetwork
follows with Jᵀ Δ_i. Nothing is averaged; the shared tensors are the buffers that every client's network starts from,
and a client keeps its own ones. A client predicts with θ_i as it was made, not with what it has trained.

Under pFedHN-PC the logits layer is the client's own: it stays at the agent, with its optimiser's momentum.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from shared.hypernetwork import Hypernetwork
from shared.method_options import HypernetworkOptions, PFedHNPCOptions
from shared.methods.base import (
    PERSONAL,
    ClientHalf,
    ClientRecord,
    Facts,
    Predictor,
    RoundTask,
    ServerHalf,
    ServerState,
    Tensors,
    Update,
    Workplace,
    options_of,
)
from shared.methods.local import ModelStepper, make_sgd, mean_loss, run_local_epochs
from shared.methods.serving import ModulePredictor, buffers_of, cut, load_shared, parameters_of, prefixed
from shared.model import SingleChannelModel, build_single
from shared.plan import FederationPlan
from shared.problems import PlanError, WeightsError
from shared.runtime import Runtime
from shared.wire import Spec

MAX_HYPERNETWORK_BYTES = 4 * 1024**3  # as much again is its momentum, and both are stored with every model
_MODEL, _DELTA = "model.", "delta."
_BUFFERS, _HEAD, _MOMENTUM = "buffers.", "head.", "momentum."
_logger = logging.getLogger(__name__)


def _is_made(plan: FederationPlan, name: str) -> bool:
    """Whether the hypernetwork makes this parameter."""
    return not (isinstance(plan.method, PFedHNPCOptions) and name.startswith("logits."))


class PFedHNServer(ServerHalf):
    """Holds the hypernetwork, the embeddings and the optimiser's momentum."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        with torch.device("meta"):
            net = build_single(plan)
        parameters = dict(net.named_parameters())
        self._model_spec = Spec.of({name: value for name, value in net.state_dict().items() if name not in parameters})
        self._made = {name: value for name, value in parameters.items() if _is_made(plan, name)}
        shapes = {name: tuple(value.shape) for name, value in self._made.items()}
        self.hypernetwork = Hypernetwork(shapes, options_of(plan, HypernetworkOptions), plan.seed)

    @override
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        if pretrained is not None:
            raise WeightsError(
                f"{self.plan.method.name} makes its models by a hypernetwork, which cannot start from given weights.",
                next_step='Use model.weights = "random".',
            )
        size_bytes = self.hypernetwork.head_bytes
        if size_bytes > MAX_HYPERNETWORK_BYTES:
            raise PlanError(
                f"A hypernetwork for {self.plan.model.backbone} at this image size has {size_bytes / 1e9:.1f} GB of "
                f"weights; {MAX_HYPERNETWORK_BYTES / 1e9:.1f} GB are the limit.",
                next_step="Choose a smaller backbone, smaller images, or a smaller method.hidden.",
            )
        return ServerState(shared=buffers_of(build_single(self.plan)), private=self.hypernetwork.initial())

    @override
    def personal(
        self, state: ServerState, client: ClientRecord, roster: Sequence[ClientRecord], facts: Facts
    ) -> Tensors:
        """The client's model."""
        complete = self.hypernetwork.complete(state.private, _names(roster, client))
        with torch.no_grad():
            return prefixed(self.hypernetwork.emit(complete, client.id), _MODEL)

    @override
    def model_spec(self) -> Spec:
        return self._model_spec  # without building the hypernetwork, which may take gigabytes

    @override
    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        return [Spec.of(self._made).prefixed(_MODEL)]

    @override
    def update_spec(self, facts: Facts) -> Spec:
        return Spec.of(self._made).prefixed(PERSONAL + _DELTA)

    @override
    def finish(
        self,
        state: ServerState,
        mean: Tensors,
        uploads: Iterable[tuple[ClientRecord, Tensors]],
        roster: Sequence[ClientRecord],
        facts: Facts,
    ) -> ServerState:
        complete = self.hypernetwork.complete(state.private, _names(roster))
        deltas = ((client.id, cut(personal, _DELTA)) for client, personal in uploads)
        return ServerState(state.shared, self.hypernetwork.follow(complete, deltas))


def _names(roster: Sequence[ClientRecord], *others: ClientRecord) -> list[str]:
    return sorted({client.id for client in [*roster, *others]})


class PFedHNClient(ClientHalf):
    """Trains what the coordinator made for it and uploads by how much it moved."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, HypernetworkOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, workplace: Workplace) -> tuple[Update, Tensors]:
        runtime, options = workplace.runtime, self.options
        if task.round > 1 and isinstance(options, PFedHNPCOptions) and not cut(private, _HEAD):
            _logger.info(
                "no logits layer of this site's own is kept here: it starts from a new one, which is right in its "
                "first round, and a loss if it has trained before"
            )
        net = runtime.prepare(self._build(task, private)).train()
        optimizer = make_sgd(net, self.plan.training)
        for name, parameter in net.named_parameters():
            if _MOMENTUM + name in private:
                optimizer.state[parameter]["momentum_buffer"] = private[_MOMENTUM + name].to(runtime.device).clone()
        clipped = [parameter for name, parameter in net.named_parameters() if _is_made(self.plan, name)]
        forward = runtime.forward_of(net)
        stepper = ModelStepper(net, self.plan, runtime, optimizer, clip_norm=options.clip_norm, clipped=clipped)

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with runtime.autocast():
                logits = forward(x)
            loss = mean_loss(logits, y)
            stepper.step(loss)
            return logits.detach(), loss.detach()

        report = run_local_epochs(
            self.plan, task, net, workplace, step, steps=options.inner_steps, reshuffle=options.inner_steps is not None
        )
        after, before = parameters_of(net), cut(task.personal, _MODEL)
        delta = {name: before[name] - after[name] for name in before}
        kept = prefixed(buffers_of(net), _BUFFERS)
        kept |= prefixed({name: value for name, value in after.items() if name not in before}, _HEAD)
        for name, parameter in net.named_parameters():
            momentum = optimizer.state[parameter].get("momentum_buffer")
            if name not in before and momentum is not None:
                kept[_MOMENTUM + name] = momentum.cpu().contiguous()
        return Update({}, prefixed(delta, _DELTA), report), kept

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        return ModulePredictor(self._build(task, private), runtime)

    def _build(self, task: RoundTask, private: Tensors) -> SingleChannelModel:
        net = build_single(self.plan)
        tensors = {**task.shared, **cut(private, _BUFFERS), **cut(task.personal, _MODEL)}
        head = {name: value for name, value in parameters_of(net).items() if not _is_made(self.plan, name)}
        return load_shared(net, {**head, **tensors, **cut(private, _HEAD)})
