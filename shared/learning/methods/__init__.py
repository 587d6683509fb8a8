"""The methods by name, each with a server half and a client half.

Halves are imported on first use: most commands only need the methods' names. Server halves, in files of their own,
import torch only where they compute with it.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from shared.contract.plan import FederationPlan
from shared.learning.methods.base import ClientHalf, ServerHalf


@dataclass(frozen=True)
class Method:
    """A method's two halves, each as `module:Class` in this package."""

    server_path: str
    client_path: str

    @property
    def server(self) -> type[ServerHalf]:
        """The coordinator's half."""
        half: type[ServerHalf] = _load(self.server_path)
        return half

    @property
    def client(self) -> type[ClientHalf]:
        """The agent's half."""
        half: type[ClientHalf] = _load(self.client_path)
        return half


METHODS = {
    "distrans": Method("distrans_server:DistransServer", "distrans:DistransClient"),
    "fedavg": Method("fedavg_server:FedAvgServer", "fedavg:FedAvgClient"),
    "fedaws": Method("fedaws_server:FedAwSServer", "fedaws:FedAwSClient"),
    "mixup": Method("fedavg_server:FedAvgServer", "mixup:MixupClient"),
    "advprop": Method("advprop_server:AdvPropServer", "advprop:AdvPropClient"),
    "moon": Method("moon_server:MoonServer", "moon:MoonClient"),
    "pfedme": Method("pfedme_server:PFedMeServer", "pfedme:PFedMeClient"),
    "pfedhn": Method("pfedhn_server:PFedHNServer", "pfedhn:PFedHNClient"),
    "pfedhn-pc": Method("pfedhn_server:PFedHNServer", "pfedhn:PFedHNClient"),
}


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def load_server_halves() -> None:
    """Import every server half now, so that no request or transaction waits for it later."""
    for method in METHODS.values():
        _load(method.server_path)


def server_half(plan: FederationPlan) -> ServerHalf:
    """Return the coordinator's half of the plan's method."""
    return METHODS[plan.method.name].server(plan)


def client_half(plan: FederationPlan) -> ClientHalf:
    """Return the agent's half of the plan's method."""
    return METHODS[plan.method.name].client(plan)
