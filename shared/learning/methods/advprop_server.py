"""AdvProp at the coordinator: FedAvg, with or without the auxiliary BatchNorm layers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from shared.contract.method_options import AdvPropOptions
from shared.learning.methods.base import ServerState, options_of
from shared.learning.methods.fedavg_server import FedAvgServer
from shared.tensors.arrays import as_arrays

if TYPE_CHECKING:
    from torch import Tensor, nn


class AdvPropServer(FedAvgServer):
    """θ ← mean of θ_i, with or without the auxiliary layers."""

    @override
    def build(self) -> "nn.Module":
        return self._complete(super().build())

    @override
    def initial_state(self, pretrained: "Mapping[str, Tensor] | None" = None) -> ServerState:
        """Accept plain pretrained weights: the auxiliary layers start as copies of the main ones."""
        from shared.learning.methods.modules import detached_state
        from shared.learning.weight_fitting import fit_weights

        net = super().build()
        if pretrained is not None:
            fit_weights(net, pretrained)
        return ServerState(shared=as_arrays(detached_state(self._complete(net))))

    def _complete(self, net: "nn.Module") -> "nn.Module":
        from shared.learning.batchnorm import add_auxiliary

        averaged = options_of(self.plan, AdvPropOptions).auxiliary_batchnorm == "averaged"
        return add_auxiliary(net) if averaged else net
