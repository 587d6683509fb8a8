"""The methods by name, each with its server half and its client half."""

from dataclasses import dataclass

from shared.methods.advprop import AdvPropClient, AdvPropServer
from shared.methods.base import ClientHalf, ServerHalf
from shared.methods.distrans import DistransClient, DistransServer
from shared.methods.fedavg import FedAvgClient, FedAvgServer
from shared.methods.fedaws import FedAwSClient, FedAwSServer
from shared.methods.mixup import MixupClient
from shared.methods.moon import MoonClient, MoonServer
from shared.methods.pfedhn import PFedHNClient, PFedHNServer
from shared.methods.pfedme import PFedMeClient, PFedMeServer
from shared.plan import FederationPlan


@dataclass(frozen=True)
class Method:
    """The two halves of a method."""

    server: type[ServerHalf]
    client: type[ClientHalf]


METHODS = {
    "distrans": Method(DistransServer, DistransClient),
    "fedavg": Method(FedAvgServer, FedAvgClient),
    "fedaws": Method(FedAwSServer, FedAwSClient),
    "mixup": Method(FedAvgServer, MixupClient),
    "advprop": Method(AdvPropServer, AdvPropClient),
    "moon": Method(MoonServer, MoonClient),
    "pfedme": Method(PFedMeServer, PFedMeClient),
    "pfedhn": Method(PFedHNServer, PFedHNClient),
    "pfedhn-pc": Method(PFedHNServer, PFedHNClient),
}


def server_half(plan: FederationPlan) -> ServerHalf:
    """The coordinator's part of the plan's method."""
    return METHODS[plan.method.name].server(plan)


def client_half(plan: FederationPlan) -> ClientHalf:
    """The agent's part of the plan's method."""
    return METHODS[plan.method.name].client(plan)
