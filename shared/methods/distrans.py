"""DisTrans: a shared double-channel model and one offset per client, optimised together at the client.

The offset of a client is private under aggregation `none`: it stays at the agent and the coordinator only sends the
seeded start. With `offset_backup` the coordinator also keeps a copy, for an agent that has lost its own. Under `mean`
and `network` the client uploads it, and what the coordinator sends back takes its place.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from shared.generator import GeneratorTrainer
from shared.heterogeneity import class_embeddings, distributional_heterogeneity
from shared.initial_weights import fit_weights
from shared.method_options import DistransOptions
from shared.methods.base import (
    PERSONAL,
    SHARED,
    ClientHalf,
    ClientRecord,
    Facts,
    LocalData,
    Predictor,
    RoundTask,
    ServerHalf,
    ServerState,
    Tensors,
    Update,
    Workplace,
    options_of,
)
from shared.methods.local import ModelStepper, mean_loss, run_local_epochs
from shared.methods.serving import (
    ModulePredictor,
    buffers_of,
    cut,
    detached_state,
    load_shared,
    parameters_of,
    prefixed,
)
from shared.model import DoubleChannelModel, build_double, frozen_statistics
from shared.offsets import initial_offset, relative_motion
from shared.plan import FederationPlan
from shared.runtime import Runtime
from shared.summation import RunningMean
from shared.wire import Entry, Spec

_AGGREGATION = "offset_aggregation"
_MEAN_OFFSET = "offset.mean"
_GENERATOR = "generator."
_LAST_OFFSET = "offset.of."
_BUFFERS = "buffers."


class DistransServer(ServerHalf):
    """θ ← mean of θ_i; offsets by the aggregation in force."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, DistransOptions)
        self._last_asked: tuple[Tensor, GeneratorTrainer] | None = None

    @override
    def facts(self, roster: Sequence[ClientRecord]) -> Facts:
        """The offset aggregation in force, which `auto` takes from the DH of the clients enrolled now."""
        wanted = self.options.offset_aggregation
        if wanted == "auto" and self.options.shared_offset:
            wanted = "mean"
        elif wanted == "auto":
            dh = distributional_heterogeneity([client.class_counts for client in roster])
            wanted = "network" if dh < self.options.dh_threshold else "none"
        return {_AGGREGATION: wanted}

    @override
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        model = build_double(self.plan, self.options.alpha, input_channels=self.options.input_channels)
        if pretrained is not None:
            fit_weights(model, pretrained)
        if self.options.batchnorm == "separate":
            model.separate_batchnorm()
        return ServerState(shared=detached_state(model))

    @override
    def personal(
        self, state: ServerState, client: ClientRecord, roster: Sequence[ClientRecord], facts: Facts
    ) -> Tensors:
        """`initial_offset` where the client's own takes over after the first round, else `offset`, to be used as is."""
        aggregation = facts[_AGGREGATION]
        if aggregation == "mean" and _MEAN_OFFSET in state.private:
            return {"offset": state.private[_MEAN_OFFSET]}
        if aggregation == "network" and any(name.startswith(_GENERATOR) for name in state.private):
            last = state.private.get(_LAST_OFFSET + client.id)
            last = self._start(client, roster) if last is None else last
            return {"offset": self._emitter(state).emit(_embedding(client, roster), last)}
        personal = {"initial_offset": self._start(client, roster)}
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
    def finish(
        self,
        state: ServerState,
        mean: Tensors,
        uploads: Iterable[tuple[ClientRecord, Tensors]],
        roster: Sequence[ClientRecord],
        facts: Facts,
    ) -> ServerState:
        private, generator, aggregation = dict(state.private), self.options.generator, facts[_AGGREGATION]
        asks_for_them = aggregation == "network" and (generator.inputs == "embedding+offset" or generator.mix < 1)
        offsets = RunningMean()
        trainer = self._generator(state) if aggregation == "network" else None
        for client, personal in uploads if _is_uploaded(facts, self.options) else ():
            if aggregation == "mean":
                offsets.add({"offset": personal["offset"]})
            if trainer is not None:
                trainer.regress(_embedding(client, roster), personal["offset"])
            if asks_for_them or self.options.offset_backup:
                private[_LAST_OFFSET + client.id] = personal["offset"]
        if aggregation == "mean":
            private[_MEAN_OFFSET] = offsets.result()["offset"]
        if trainer is not None:
            private |= {_GENERATOR + name: value for name, value in trainer.state().items()}
        return ServerState(shared=state.shared | mean, private=private)  # what is not averaged stays at its start

    @override
    def private_spec(self, found: Spec) -> Spec:
        names = found.entries.keys()
        offsets = [name for name in names if name == _MEAN_OFFSET or name.startswith(_LAST_OFFSET)]
        spec = Spec(dict.fromkeys(offsets, Entry(self.plan.image.shape, torch.float32)))
        if any(name.startswith(_GENERATOR) for name in names):
            trainer = GeneratorTrainer(self.plan, self.options.generator.model_copy(update={"steps": 1}))
            # After one step its optimiser has all the tensors that it will ever have.
            trainer.regress(torch.zeros(len(self.plan.classes)), torch.zeros(self.plan.image.shape))
            spec |= Spec.of(trainer.state()).prefixed(_GENERATOR)
        return spec

    def _emitter(self, state: ServerState) -> GeneratorTrainer:
        """The state's network, not to be trained; the last one is kept, because every client asks in turn."""
        mark = next(value for name, value in state.private.items() if name.startswith(_GENERATOR))
        last = self._last_asked
        if last is None or last[0] is not mark:  # every round makes these tensors anew
            last = self._last_asked = mark, self._generator(state)
        return last[1]

    def _generator(self, state: ServerState) -> GeneratorTrainer:
        trainer = GeneratorTrainer(self.plan, self.options.generator)
        stored = cut(state.private, _GENERATOR)
        if stored:
            trainer.restore(stored)
        return trainer

    def _start(self, client: ClientRecord, roster: Sequence[ClientRecord]) -> Tensor:
        start = initial_offset(self.plan, self.options, client.id)
        if self.options.offset_init != "generator":
            return start
        # The output of the untrained network alone, whatever it has learned since.
        options = self.options.generator.model_copy(update={"mix": 1.0})
        return GeneratorTrainer(self.plan, options).emit(_embedding(client, roster), start)


def _build(plan: FederationPlan, options: DistransOptions) -> DoubleChannelModel:
    return build_double(plan, options.alpha, options.batchnorm, options.shared_dropout, options.input_channels)


def _is_uploaded(facts: Facts, options: DistransOptions) -> bool:
    return facts[_AGGREGATION] != "none" or options.offset_backup


def _embedding(client: ClientRecord, roster: Sequence[ClientRecord]) -> Tensor:
    known = [record for record in roster if record.id != client.id] + [client]  # a client that has left still counts
    counts = np.asarray([record.class_counts for record in known])
    return torch.from_numpy(class_embeddings(counts)[-1]).float()


class DistransClient(ClientHalf):
    """Algorithm 1 at the client."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, DistransOptions)

    @override
    def train(self, task: RoundTask, private: Tensors, workplace: Workplace) -> tuple[Update, Tensors]:
        runtime = workplace.runtime
        net = load_shared(_build(self.plan, self.options), task.shared | cut(private, _BUFFERS))
        net = runtime.prepare(net).train()
        start = current_offset(task, private)
        first = private.get("initial_offset", task.personal.get("initial_offset", start))
        offset = start.to(runtime.device).clone().requires_grad_()
        stepper = OffsetStepper(net, offset, self.plan, self.options, runtime)
        aggregated = task.facts[_AGGREGATION] != "none"
        centre = start if aggregated else private.get("bound_centre", first)
        if self._is_bounded(workplace.data):
            stepper.bound_around(centre)
        report = run_local_epochs(self.plan, task, net, workplace, stepper.step)
        trained = offset.detach().cpu()
        report = report.model_copy(update={"offset_motion": relative_motion(trained, first)})
        uploaded = {"offset": trained} if _is_uploaded(task.facts, self.options) else {}
        kept = {"offset": trained, "initial_offset": first}
        if self.options.offset_bound is not None:
            kept["bound_centre"] = centre.clone()  # a file takes no tensor under two names
        if self.options.batchnorm_statistics == "averaged":
            return Update(detached_state(net), uploaded, report), kept
        return Update(parameters_of(net), uploaded, report), kept | prefixed(buffers_of(net), _BUFFERS)

    def _is_bounded(self, data: LocalData) -> bool:
        if self.options.offset_bound is None or self.options.bounded_clients == "none":
            return False
        return self.options.bounded_clients == "all" or len(data.labels.unique()) == 1

    @override
    def predictor(self, task: RoundTask, private: Tensors, runtime: Runtime, *, use_offset: bool = True) -> Predictor:
        net = load_shared(_build(self.plan, self.options), task.shared | cut(private, _BUFFERS))
        if not use_offset:
            net.alpha = 0.0  # both channels see the image as it is
        return ModulePredictor(net, runtime, current_offset(task, private))

    @override
    def offset(self, task: RoundTask, private: Tensors) -> Tensor | None:
        return current_offset(task, private)


def current_offset(task: RoundTask, private: Tensors) -> Tensor:
    """The coordinator's offset where it aggregates them; else the agent's own; else its backup; else the start."""
    for tensors, name in ((task.personal, "offset"), (private, "offset"), (task.personal, "offset_backup")):
        if name in tensors:
            return tensors[name]
    return task.personal["initial_offset"]


class OffsetStepper:
    """One mini-batch of the joint optimisation, by the plan's update rule."""

    def __init__(
        self, net: DoubleChannelModel, offset: Tensor, plan: FederationPlan, options: DistransOptions, runtime: Runtime
    ) -> None:
        self._net, self._offset, self._options, self._runtime = net, offset, options, runtime
        self._forward = runtime.forward_of(net)
        self._model = ModelStepper(net, plan, runtime)
        self._frozen = options.effective_offset_lr == 0 or options.alpha == 0
        make = torch.optim.Adam if options.offset_optimizer == "adam" else torch.optim.SGD
        self._optimizer = make([offset], lr=options.effective_offset_lr)
        self._limits: tuple[Tensor, Tensor] | None = None

    def bound_around(self, centre: Tensor) -> None:
        """From now on keep every value of the offset within the plan's bound of this one's."""
        centre, bound = centre.to(self._offset.device), self._options.offset_bound
        if bound is not None:
            self._limits = centre - bound, centre + bound

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Update offset and model; the logits and the loss are those that the model's step came from."""
        if self._frozen:
            return self._step_model(x, y, self._offset.detach())
        scale = self._model.loss_scale
        if self._options.update_rule == "joint":
            self._offset.grad = torch.zeros_like(self._offset)
            result = self._step_model(x, y, self._offset)
            self._step_offset(self._offset.grad, scale, len(y))
            return result
        # The offset's step leaves the weights as they are, so both passes share what depends on the images alone.
        # A compiled pass takes leaves of the graph only and computes it anew.
        with self._runtime.autocast():
            of_image = None if self._runtime.compile else self._net.of_image(x)
        with frozen_statistics(self._net):
            _, loss = self._loss(x, y, self._offset, None if of_image is None else of_image.detach())
            # Only the offset's gradient is asked for, so that none of the weights' is computed.
            (gradient,) = torch.autograd.grad(loss * scale, [self._offset])
        self._step_offset(gradient, scale, len(y))
        return self._step_model(x, y, self._offset.detach(), of_image)

    def _loss(self, x: Tensor, y: Tensor, offset: Tensor, of_image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with self._runtime.autocast():
            logits = self._forward(x, offset, of_image)
        return logits, mean_loss(logits, y)

    def _step_model(
        self, x: Tensor, y: Tensor, offset: Tensor, of_image: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits, loss = self._loss(x, y, offset, of_image)
        self._model.step(loss)
        return logits.detach(), loss.detach()

    def _step_offset(self, gradient: Tensor, scale: float, batch: int) -> None:
        if scale != 1:
            gradient = gradient / scale
            if not bool(gradient.isfinite().all()):
                return  # overflow in fp16: the scaler lowers its scale for the next batch
        if self._options.offset_gradient == "sum":
            gradient = gradient * batch
        self._offset.grad = gradient.sign() if self._options.offset_optimizer == "sign-sgd" else gradient
        self._optimizer.step()
        self._offset.grad = None
        if self._limits is not None:
            self._offset.data.clamp_(*self._limits)
