"""pFedHN and pFedHN-PC at the coordinator: a hypernetwork, trained with torch, that generates each client's model."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from shared.contract.errors import PlanError, WeightsError
from shared.contract.method_options import HypernetworkOptions, PFedHNPCOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    ClientRecord,
    Facts,
    PersonalUploads,
    RoundContext,
    ServerHalf,
    ServerState,
    TorchCall,
    options_of,
)
from shared.tensors.arrays import Array, Arrays, as_arrays, as_tensors
from shared.tensors.names import PERSONAL, add_prefix, strip_prefix
from shared.tensors.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from shared.learning.hypernetwork import Hypernetwork

MAX_HYPERNETWORK_BYTES = 4 * 1024**3  # momentum takes as much again, and both are stored with every model
MODEL, DELTA = "model.", "delta."


def is_generated(plan: FederationPlan, name: str) -> bool:
    """Return whether the hypernetwork generates this parameter."""
    return not (isinstance(plan.method, PFedHNPCOptions) and name.startswith("logits."))


class PFedHNServer(ServerHalf):
    """Trains the hypernetwork and the clients' embeddings."""

    @override
    def torch_calls(self, facts: Facts) -> Collection[TorchCall]:
        return ("personal", "next_private", "update_spec")

    @override
    def initial_state(self, pretrained: "Mapping[str, Tensor] | None" = None) -> ServerState:
        from shared.learning.methods.modules import buffers_of
        from shared.learning.model import build_single

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
        buffers = as_arrays(buffers_of(build_single(self.plan)))
        return ServerState(shared=buffers, private=as_arrays(self.hypernetwork.initial()))

    @override
    def personal(self, state: ServerState, client: ClientRecord, round_: RoundContext) -> Arrays:
        """Return the client's model."""
        import torch

        complete = self.hypernetwork.complete(as_tensors(state.private), _names(round_.roster, client))
        with torch.no_grad():
            return as_arrays(add_prefix(self.hypernetwork.generate(complete, client.id), MODEL))

    @override
    def model_spec(self) -> Spec:
        return self._specs[0]  # avoids building the hypernetwork, which may take gigabytes

    @override
    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        return [self._specs[1].prefixed(MODEL)]

    @override
    def update_spec(self, facts: Facts) -> Spec:
        return self._specs[1].prefixed(PERSONAL + DELTA)

    @override
    def next_private(self, private: Mapping[str, Array], uploads: PersonalUploads, round_: RoundContext) -> Arrays:
        complete = self.hypernetwork.complete(as_tensors(private), _names(round_.roster))
        deltas = ((client.id, as_tensors(strip_prefix(personal, DELTA))) for client, personal in uploads)
        return as_arrays(self.hypernetwork.apply_updates(complete, deltas))

    @cached_property
    def hypernetwork(self) -> "Hypernetwork":
        """The hypernetwork, without its weights."""
        from shared.learning.hypernetwork import Hypernetwork

        shapes = {name: entry.shape for name, entry in self._specs[1].entries.items()}
        return Hypernetwork(shapes, options_of(self.plan, HypernetworkOptions), self.plan.seed)

    @cached_property
    def _specs(self) -> tuple[Spec, Spec]:
        """The specs of the network's buffers and of its generated parameters."""
        import torch

        from shared.learning.model import build_single

        with torch.device("meta"):
            net = build_single(self.plan)
        parameters = dict(net.named_parameters())
        buffers = {name: value for name, value in net.state_dict().items() if name not in parameters}
        generated = {name: value for name, value in parameters.items() if is_generated(self.plan, name)}
        return Spec.of(buffers), Spec.of(generated)


def _names(roster: Sequence[ClientRecord], *others: ClientRecord) -> list[str]:
    return sorted({client.id for client in [*roster, *others]})
