"""pFedMe at the coordinator: w ← (1 − β) w + β × mean of the clients' copies, for parameters only."""

import numpy as np
from typing_extensions import override

from shared.contract.method_options import PFedMeOptions
from shared.contract.plan import FederationPlan
from shared.learning.methods.base import (
    Facts,
    PersonalUploads,
    RoundContext,
    ServerState,
    averaged_parameters,
    next_shared,
    options_of,
)
from shared.learning.methods.fedavg_server import FedAvgServer
from shared.learning.methods.server_steps import scaled
from shared.tensors.arrays import Arrays
from shared.tensors.names import SHARED
from shared.tensors.spec import Spec


class PFedMeServer(FedAvgServer):
    """w ← (1 − β) w + β × mean of w_i, for parameters only."""

    def __init__(self, plan: FederationPlan) -> None:
        super().__init__(plan)
        self.options = options_of(plan, PFedMeOptions)

    @override
    def update_spec(self, facts: Facts) -> Spec:
        import torch

        with torch.device("meta"):
            return Spec.of(dict(self.build().named_parameters())).prefixed(SHARED)

    @override
    def stored_update_spec(self, shared: Spec, private: Spec, facts: Facts) -> Spec | None:
        parameters = averaged_parameters(shared, self.plan)
        return None if parameters is None else parameters.prefixed(SHARED)

    @override
    def finish(self, state: ServerState, mean: Arrays, uploads: PersonalUploads, round_: RoundContext) -> ServerState:
        beta = self.options.server_mix
        if beta != 1:
            with np.errstate(over="ignore", invalid="ignore"):  # the result is checked before it is published
                for name, value in mean.items():
                    mean[name] = np.asarray(scaled(state.shared[name], 1 - beta) + scaled(value, beta))
        return ServerState(next_shared(state.shared, mean))
