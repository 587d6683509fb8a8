"""DisTrans: a shared double-channel model and one offset per client, trained jointly at the client.

Under aggregation `none`, a client's offset is private: it stays at the agent, and the coordinator only sends the seeded
initial offset. With `offset_backup` the coordinator also keeps a copy for agents that lose their state. Under `mean`
and `network`, clients upload their offsets and replace them with what the coordinator sends back.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan
from shared.learning.generator import GeneratorTrainer
from shared.learning.heterogeneity import class_embeddings, distributional_heterogeneity
from shared.learning.methods.base import (
    ClientHalf,
    ClientRecord,
    Facts,
    LocalData,
    PersonalUploads,
    Predictor,
    RoundContext,
    RoundTask,
    ServerHalf,
    ServerState,
    TrainingContext,
    Update,
    known_counts,
    options_of,
)
from shared.learning.methods.modules import (
    ModulePredictor,
    buffers_of,
    detached_state,
    load_weights,
    parameters_of,
)
from shared.learning.methods.training_loop import LocalTraining, ModelStepper, mean_loss
from shared.learning.model import DoubleChannelModel, build_double, frozen_statistics
from shared.learning.offsets import initial_offset, relative_motion
from shared.learning.runtime import Runtime
from shared.learning.site_prior import site_prior_shift
from shared.learning.weight_fitting import fit_weights
from shared.tensors.mean import RunningMean
from shared.tensors.names import PERSONAL, SHARED, Tensors, add_prefix, strip_prefix
from shared.tensors.spec import Entry, Spec

_AGGREGATION = "offset_aggregation"
_MEAN_OFFSET = "offset.mean"
_GENERATOR = "generator."
_LAST_OFFSET = "offset.of."
_BUFFERS = "buffers."


class DistransServer(ServerHalf):
    """θ ← mean of θ_i; offsets are aggregated as the round's facts say."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, DistransOptions)
        self._cached: tuple[Tensor, GeneratorTrainer] | None = None

    @override
    def facts(self, roster: Sequence[ClientRecord]) -> Facts:
        """Return the offset aggregation in force.

        `auto` derives it from the DH of the enrolled clients that tell their class counts; without any, it is `none`.
        """
        wanted = self.options.offset_aggregation
        if wanted == "auto" and self.options.shared_offset:
            wanted = "mean"
        elif wanted == "auto":
            counts = known_counts(roster)
            dh = distributional_heterogeneity(counts) if counts else 1.0
            wanted = "network" if dh < self.options.dh_threshold else "none"
        return super().facts(roster) | {_AGGREGATION: wanted}

    @override
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        model = build_double(self.plan, self.options.alpha, input_channels=self.options.input_channels)
        if pretrained is not None:
            fit_weights(model, pretrained)
        if self.options.batchnorm == "separate":
            model.separate_batchnorm()
        return ServerState(shared=detached_state(model))

    @override
    def personal(self, state: ServerState, client: ClientRecord, round_: RoundContext) -> Tensors:
        """Return `offset` if offsets are aggregated, else `initial_offset`, which the client's own later replaces."""
        aggregation = round_.facts[_AGGREGATION]
        if aggregation == "mean" and _MEAN_OFFSET in state.private:
            return {"offset": state.private[_MEAN_OFFSET]}
        if aggregation == "network" and any(name.startswith(_GENERATOR) for name in state.private):
            last = state.private.get(_LAST_OFFSET + client.id)
            last = self._start(client, round_) if last is None else last
            return {"offset": self._emitter(state).generate(_embedding(client, round_.roster), last)}
        personal = {"initial_offset": self._start(client, round_)}
        if self.options.offset_backup and _LAST_OFFSET + client.id in state.private:
            personal["offset_backup"] = state.private[_LAST_OFFSET + client.id]
        return personal

    @override
    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        offset = Entry(self.plan.image.shape, torch.float32)
        forms = [{"initial_offset": offset}]
        if self.options.offset_backup:
            forms.append({"initial_offset": offset, "offset_backup": offset})
        if facts.get(_AGGREGATION) != "none":
            forms.append({"offset": offset})
        return [Spec(form) for form in forms]

    @override
    def update_spec(self, facts: Facts) -> Spec:
        with torch.device("meta"):
            model = _build(self.plan, self.options)
        averaged = self.options.batchnorm_statistics == "averaged"
        spec = Spec.of(model.state_dict() if averaged else dict(model.named_parameters())).prefixed(SHARED)
        if not _is_uploaded(facts, self.options):
            return spec
        return spec | Spec({f"{PERSONAL}offset": Entry(self.plan.image.shape, torch.float32)})

    @override
    def finish(self, state: ServerState, mean: Tensors, uploads: PersonalUploads, round_: RoundContext) -> ServerState:
        private, generator, aggregation = dict(state.private), self.options.generator, round_.facts[_AGGREGATION]
        needs_last_offsets = aggregation == "network" and (generator.inputs == "embedding+offset" or generator.mix < 1)
        offsets = RunningMean()
        trainer = self._generator(state) if aggregation == "network" else None
        for client, personal in uploads if _is_uploaded(round_.facts, self.options) else ():
            if aggregation == "mean":
                offsets.add({"offset": personal["offset"]})
            if trainer is not None:
                trainer.fit(_embedding(client, round_.roster), personal["offset"])
            if needs_last_offsets or self.options.offset_backup:
                private[_LAST_OFFSET + client.id] = personal["offset"]
        if aggregation == "mean":
            private[_MEAN_OFFSET] = offsets.result()["offset"]
        if trainer is not None:
            private |= add_prefix(trainer.state(), _GENERATOR)
        return ServerState(shared=state.shared | mean, private=private)  # what is not averaged keeps its initial value

    @override
    def private_spec(self, found: Spec) -> Spec:
        names = found.entries.keys()
        offsets = [name for name in names if name == _MEAN_OFFSET or name.startswith(_LAST_OFFSET)]
        spec = Spec(dict.fromkeys(offsets, Entry(self.plan.image.shape, torch.float32)))
        if any(name.startswith(_GENERATOR) for name in names):
            trainer = GeneratorTrainer(self.plan, self.options.generator.model_copy(update={"steps": 1}))
            # After one step, its optimizer has every tensor it will ever have.
            trainer.fit(torch.zeros(len(self.plan.classes)), torch.zeros(self.plan.image.shape))
            spec |= Spec.of(trainer.state()).prefixed(_GENERATOR)
        return spec

    def _emitter(self, state: ServerState) -> GeneratorTrainer:
        """Return the state's network, only for generating; cached, because it is needed for every client in turn."""
        key = next(value for name, value in state.private.items() if name.startswith(_GENERATOR))
        cached = self._cached
        if cached is None or cached[0] is not key:  # every round creates new tensors
            cached = self._cached = key, self._generator(state)
        return cached[1]

    def _generator(self, state: ServerState) -> GeneratorTrainer:
        trainer = GeneratorTrainer(self.plan, self.options.generator)
        stored = strip_prefix(state.private, _GENERATOR)
        if stored:
            trainer.restore(stored)
        return trainer

    def _start(self, client: ClientRecord, round_: RoundContext) -> Tensor:
        start = initial_offset(self.plan, self.options, client.id)
        wanted = self.options.offset_init
        if wanted == "auto" and round_.facts[_AGGREGATION] == "network":
            wanted = "generator"
        return self._untrained.generate(_embedding(client, round_.roster), start) if wanted == "generator" else start

    @functools.cached_property
    def _untrained(self) -> GeneratorTrainer:
        """The network before its first step; its output alone, without `mix`."""
        return GeneratorTrainer(self.plan, self.options.generator.model_copy(update={"mix": 1.0}))


def _build(plan: FederationPlan, options: DistransOptions) -> DoubleChannelModel:
    return build_double(plan, options.alpha, options.batchnorm, options.shared_dropout, options.input_channels)


def _is_uploaded(facts: Facts, options: DistransOptions) -> bool:
    return facts[_AGGREGATION] != "none" or options.offset_backup


def _embedding(client: ClientRecord, roster: Sequence[ClientRecord]) -> Tensor:
    known = [record for record in roster if record.id != client.id] + [client]  # include a client that has left
    counts = np.asarray([record.class_counts for record in known])
    return torch.from_numpy(class_embeddings(counts)[-1]).float()


class DistransClient(ClientHalf):
    """Algorithm 1, run by the client."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, DistransOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        runtime = context.runtime
        net = load_weights(_build(self.plan, self.options), task.shared | strip_prefix(private, _BUFFERS))
        net = runtime.prepare(net).train()
        start = current_offset(task, private)
        first = private.get("initial_offset", task.personal.get("initial_offset", start))
        offset = start.to(runtime.device).clone().requires_grad_()
        shift = site_prior_shift(self.plan, task, context.data) if self.options.offset_loss == "prior" else None
        stepper = OffsetStepper(net, offset, self.plan, self.options, runtime, shift)
        aggregated = task.facts[_AGGREGATION] != "none"
        center = start if aggregated else private.get("bound_centre", first)
        if self._is_bounded(context.data):
            stepper.bound_around(center)
        report = LocalTraining(self.plan, task, context).run(net, stepper.step)
        trained = offset.detach().cpu()
        report = report.model_copy(update={"offset_motion": relative_motion(trained, first)})
        uploaded = {"offset": trained} if _is_uploaded(task.facts, self.options) else {}
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
        net = load_weights(_build(self.plan, self.options), task.shared | strip_prefix(private, _BUFFERS))
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
