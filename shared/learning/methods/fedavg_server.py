"""FedAvg at the coordinator: the mean of the clients' models. mixup and AdvProp have the same server half."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from shared.learning.methods.base import Facts, ServerHalf, ServerState
from shared.tensors.arrays import as_arrays
from shared.tensors.names import SHARED
from shared.tensors.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor, nn


class FedAvgServer(ServerHalf):
    """θ ← mean of θ_i."""

    def build(self) -> "nn.Module":
        """Return the network to average, with seeded random weights."""
        from shared.learning.model import build_single

        return build_single(self.plan)

    @override
    def initial_state(self, pretrained: "Mapping[str, Tensor] | None" = None) -> ServerState:
        from shared.learning.methods.modules import detached_state
        from shared.learning.weight_fitting import fit_weights

        model = self.build()
        if pretrained is not None:
            fit_weights(model, pretrained)
        return ServerState(shared=as_arrays(detached_state(model)))

    @override
    def update_spec(self, facts: Facts) -> Spec:
        import torch

        with torch.device("meta"):
            return Spec.of(self.build().state_dict()).prefixed(SHARED)

    @override
    def stored_update_spec(self, shared: Spec, private: Spec, facts: Facts) -> Spec | None:
        return shared.prefixed(SHARED)
