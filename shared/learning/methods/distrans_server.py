"""DisTrans at the coordinator: the mean of the models, and the offsets as the round's facts say.

Only the aggregation network needs torch, and initial offsets that it generates or draws from a normal distribution.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from shared.contract.method_options import DistransOptions
from shared.contract.plan import FederationPlan
from shared.learning.heterogeneity import class_embeddings, distributional_heterogeneity
from shared.learning.methods.base import (
    ClientRecord,
    Facts,
    PersonalUploads,
    RoundContext,
    ServerHalf,
    ServerState,
    TorchCall,
    averaged_parameters,
    known_counts,
    options_of,
)
from shared.learning.offsets import initial_offset
from shared.tensors.arrays import Array, Arrays, as_array, as_arrays, as_tensor, as_tensors
from shared.tensors.mean import RunningMean
from shared.tensors.names import PERSONAL, SHARED, add_prefix, strip_prefix
from shared.tensors.spec import Entry, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from shared.learning.generator import GeneratorTrainer

AGGREGATION = "offset_aggregation"
_MEAN_OFFSET = "offset.mean"
_GENERATOR = "generator."
_LAST_OFFSET = "offset.of."
_NETWORK_CALLS: tuple[TorchCall, ...] = ("personal", "next_private")


class DistransServer(ServerHalf):
    """θ ← mean of θ_i; offsets are aggregated as the round's facts say."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, DistransOptions)
        self._offset = Entry(plan.image.shape, "F32")
        self._cached: tuple[Array, GeneratorTrainer] | None = None

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
        return super().facts(roster) | {AGGREGATION: wanted}

    @override
    def torch_calls(self, facts: Facts) -> Collection[TorchCall]:
        if facts.get(AGGREGATION) == "network":
            return _NETWORK_CALLS
        if self.options.offset_init in ("normal", "generator"):
            return _NETWORK_CALLS[:1]
        return ()

    @override
    def initial_state(self, pretrained: "Mapping[str, Tensor] | None" = None) -> ServerState:
        from shared.learning.methods.modules import detached_state
        from shared.learning.model import build_double
        from shared.learning.weight_fitting import fit_weights

        model = build_double(self.plan, self.options.alpha, input_channels=self.options.input_channels)
        if pretrained is not None:
            fit_weights(model, pretrained)
        if self.options.batchnorm == "separate":
            model.separate_batchnorm()
        return ServerState(shared=as_arrays(detached_state(model)))

    @override
    def personal(self, state: ServerState, client: ClientRecord, round_: RoundContext) -> Arrays:
        """Return `offset` if offsets are aggregated, else `initial_offset`, which the client's own later replaces."""
        aggregation = round_.facts[AGGREGATION]
        if aggregation == "mean" and _MEAN_OFFSET in state.private:
            return {"offset": state.private[_MEAN_OFFSET]}
        if aggregation == "network" and any(name.startswith(_GENERATOR) for name in state.private):
            last = state.private.get(_LAST_OFFSET + client.id)
            last = self._start(client, round_) if last is None else last
            return {"offset": _generated(self._emitter(state), client, round_, last)}
        personal = {"initial_offset": self._start(client, round_)}
        if self.options.offset_backup and _LAST_OFFSET + client.id in state.private:
            personal["offset_backup"] = state.private[_LAST_OFFSET + client.id]
        return personal

    @override
    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        forms = [{"initial_offset": self._offset}]
        if self.options.offset_backup:
            forms.append({"initial_offset": self._offset, "offset_backup": self._offset})
        if facts.get(AGGREGATION) != "none":
            forms.append({"offset": self._offset})
        return [Spec(form) for form in forms]

    @override
    def update_spec(self, facts: Facts) -> Spec:
        import torch

        from shared.learning.methods.distrans import build_network

        with torch.device("meta"):
            model = build_network(self.plan, self.options)
        spec = Spec.of(model.state_dict() if self._averages_buffers else dict(model.named_parameters()))
        return self._with_offset(spec, facts)

    @override
    def stored_update_spec(self, shared: Spec, private: Spec, facts: Facts) -> Spec | None:
        averaged = shared if self._averages_buffers else averaged_parameters(shared, self.plan)
        return None if averaged is None else self._with_offset(averaged, facts)

    def _with_offset(self, averaged: Spec, facts: Facts) -> Spec:
        offset = {f"{PERSONAL}offset": self._offset} if is_offset_uploaded(facts, self.options) else {}
        return averaged.prefixed(SHARED) | Spec(offset)

    @property
    def _averages_buffers(self) -> bool:
        return self.options.batchnorm_statistics == "averaged"

    @override
    def next_private(self, private: Mapping[str, Array], uploads: PersonalUploads, round_: RoundContext) -> Arrays:
        after, generator, aggregation = dict(private), self.options.generator, round_.facts[AGGREGATION]
        needs_last_offsets = aggregation == "network" and (generator.inputs == "embedding+offset" or generator.mix < 1)
        offsets = RunningMean()
        trainer = self._generator(private) if aggregation == "network" else None
        for client, personal in uploads if is_offset_uploaded(round_.facts, self.options) else ():
            if aggregation == "mean":
                offsets.add({"offset": personal["offset"]})
            if trainer is not None:
                trainer.fit(_embedding(client, round_.roster), as_tensor(personal["offset"]))
            if needs_last_offsets or self.options.offset_backup:
                after[_LAST_OFFSET + client.id] = personal["offset"]
        if aggregation == "mean":
            after[_MEAN_OFFSET] = offsets.result()["offset"]
        if trainer is not None:
            after |= as_arrays(add_prefix(trainer.state(), _GENERATOR))
        return after

    @override
    def private_spec(self, found: Spec) -> Spec:
        names = found.entries.keys()
        offsets = [name for name in names if name == _MEAN_OFFSET or name.startswith(_LAST_OFFSET)]
        spec = Spec(dict.fromkeys(offsets, self._offset))
        if any(name.startswith(_GENERATOR) for name in names):
            import torch

            from shared.learning.generator import GeneratorTrainer

            trainer = GeneratorTrainer(self.plan, self.options.generator.model_copy(update={"steps": 1}))
            # After one step, its optimizer has every tensor it will ever have.
            trainer.fit(torch.zeros(len(self.plan.classes)), torch.zeros(self.plan.image.shape))
            spec |= Spec.of(trainer.state()).prefixed(_GENERATOR)
        return spec

    def _emitter(self, state: ServerState) -> "GeneratorTrainer":
        """Return the state's network, only for generating; cached, because it is needed for every client in turn."""
        key = next(value for name, value in state.private.items() if name.startswith(_GENERATOR))
        cached = self._cached
        if cached is None or cached[0] is not key:  # every round creates new tensors
            cached = self._cached = key, self._generator(state.private)
        return cached[1]

    def _generator(self, private: Mapping[str, Array]) -> "GeneratorTrainer":
        from shared.learning.generator import GeneratorTrainer

        trainer = GeneratorTrainer(self.plan, self.options.generator)
        stored = strip_prefix(private, _GENERATOR)
        if stored:
            trainer.restore(as_tensors(stored))
        return trainer

    def _start(self, client: ClientRecord, round_: RoundContext) -> Array:
        start = initial_offset(self.plan, self.options, client.id)
        wanted = self.options.offset_init
        if wanted == "auto" and round_.facts[AGGREGATION] == "network":
            wanted = "generator"
        return _generated(self._untrained, client, round_, start) if wanted == "generator" else start

    @functools.cached_property
    def _untrained(self) -> "GeneratorTrainer":
        """The network before its first step; its output alone, without `mix`."""
        from shared.learning.generator import GeneratorTrainer

        return GeneratorTrainer(self.plan, self.options.generator.model_copy(update={"mix": 1.0}))


def is_offset_uploaded(facts: Facts, options: DistransOptions) -> bool:
    """Return whether clients upload their offsets."""
    return facts[AGGREGATION] != "none" or options.offset_backup


def _generated(network: "GeneratorTrainer", client: ClientRecord, round_: RoundContext, last: Array) -> Array:
    return as_array(network.generate(_embedding(client, round_.roster), as_tensor(last)))


def _embedding(client: ClientRecord, roster: Sequence[ClientRecord]) -> "Tensor":
    known = [record for record in roster if record.id != client.id] + [client]  # include a client that has left
    counts = np.asarray([record.class_counts for record in known])
    return as_tensor(class_embeddings(counts)[-1].astype(np.float32))
