"""MOON at the coordinator: FedAvg, with momentum across rounds if the plan sets it."""

from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from shared.contract.method_options import MoonOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import PersonalUploads, RoundContext, ServerState, options_of
from shared.learning.methods.fedavg_server import FedAvgServer
from shared.learning.methods.server_steps import scaled
from shared.tensors.arrays import Arrays, is_float
from shared.tensors.names import add_prefix

if TYPE_CHECKING:
    from torch import nn

_MOMENTUM = "momentum."
_STATISTICS = ("running_mean", "running_var")  # momentum could make a variance negative


class MoonServer(FedAvgServer):
    """θ ← mean of θ_i, with momentum across rounds if the plan sets it."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, MoonOptions)

    @override
    def build(self) -> "nn.Module":
        from shared.learning.methods.moon import MoonModel

        return MoonModel(self.plan)

    @override
    def finish(self, state: ServerState, mean: Arrays, uploads: PersonalUploads, round_: RoundContext) -> ServerState:
        keep = self.options.server_momentum
        if not keep:
            return ServerState(shared=mean)
        shared, velocity = dict(mean), Arrays()
        for name, value in mean.items():
            if not is_float(value) or name.endswith(_STATISTICS):
                continue
            with np.errstate(over="ignore", invalid="ignore"):  # the result is checked before it is published
                before = state.shared[name]
                velocity[name] = scaled(np.asarray(before - value), 1 - keep)
                if _MOMENTUM + name in state.private:
                    velocity[name] += scaled(state.private[_MOMENTUM + name], keep)
                shared[name] = np.asarray(before - velocity[name])
        return ServerState(shared, add_prefix(velocity, _MOMENTUM))
