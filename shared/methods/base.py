"""What a method must say: its server half, run by the coordinator, and its client half, run by every agent.

Tensors come in three kinds. *Shared* ones are the same for all clients and are averaged on the way up. *Personal* ones
are addressed to one client, in either direction. *Private* ones never leave the agent, which keeps them from round to
round. Halves hold no state of their own: they take state and return new state, so that a round can be repeated after a
crash with the same result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from shared.limits import MAX_WEIGHT
from shared.method_options import Frozen
from shared.plan import FederationPlan
from shared.schemas import TrainingReport
from shared.wire import Spec, encode

if TYPE_CHECKING:
    from torch import Tensor

    from shared.runtime import Runtime
    from shared.summation import RunningMean

Tensors = dict[str, "Tensor"]
Options = TypeVar("Options", bound=Frozen)
Facts = dict[str, str]  # what the coordinator decided for a round beyond the plan, e.g. the offset aggregation in force
SHARED, PERSONAL = "shared.", "personal."  # how an update's tensors are told apart on the wire


def options_of(plan: FederationPlan, kind: type[Options]) -> Options:
    """The plan's method options, which must be of this kind."""
    if not isinstance(plan.method, kind):
        raise TypeError(f"this plan is for {plan.method.name}")
    return plan.method


@dataclass(frozen=True)
class ClientRecord:
    """What the coordinator knows of a client."""

    id: str
    class_counts: tuple[int, ...]

    @property
    def images(self) -> int:
        """Training images in all."""
        return sum(self.class_counts)


@dataclass(frozen=True)
class ServerState:
    """What the coordinator keeps between rounds: the published model, and tensors that it shows to nobody."""

    shared: Tensors
    private: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What a client uploads for a round."""

    shared: Tensors
    personal: Tensors
    report: TrainingReport

    def encode(self) -> bytes:
        """As it goes over the wire."""
        tensors = {SHARED + name: value for name, value in self.shared.items()}
        tensors |= {PERSONAL + name: value for name, value in self.personal.items()}
        return encode(tensors, {"report": self.report.model_dump_json()})


class ServerHalf(ABC):
    """The coordinator's part of a method."""

    def __init__(self, plan: FederationPlan) -> None:
        self.plan = plan

    def facts(self, roster: Sequence[ClientRecord]) -> Facts:
        """What holds for the next round beyond the plan; frozen when the round opens and told to its participants."""
        del roster
        return {}

    @abstractmethod
    def initial_state(self, pretrained: Tensors | None = None) -> ServerState:
        """θ⁰ and whatever else the method starts from; `pretrained` weights take the random ones' place."""

    @abstractmethod
    def personal(
        self, state: ServerState, client: ClientRecord, roster: Sequence[ClientRecord], facts: Facts
    ) -> Tensors:
        """The personal tensors to send to a client: a pure function of its arguments."""

    @abstractmethod
    def update_spec(self, facts: Facts) -> Spec:
        """The tensors of an update, by their wire names."""

    def private_spec(self, found: Spec) -> Spec:
        """What stored private state with the tensors of `found` must look like, before anything is computed with it.

        Unless a method says more: what it starts with is there and has its shape.
        """
        return found | Spec.of(self.initial_state().private)

    def model_spec(self) -> Spec:
        """The published model's tensors; agents check what they download against it."""
        return Spec.of(self.initial_state().shared)

    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        """The forms that the personal tensors sent to a client may take under these facts; at least one."""
        del facts
        return [Spec({})]

    def weight(self, client: ClientRecord) -> int:
        """The weight of a client's update in the mean: from the frozen roster, not from what the update says."""
        return min(max(client.images, 1), MAX_WEIGHT) if self.plan.averaging == "samples" else 1

    def fold(self, mean: "RunningMean", shared: Tensors, client: ClientRecord) -> None:
        """Add one client's shared tensors to the round's mean; in any order."""
        mean.add(shared, self.weight(client))

    @abstractmethod
    def finish(
        self,
        state: ServerState,
        mean: Tensors,
        uploads: Iterable[tuple[ClientRecord, Tensors]],
        roster: Sequence[ClientRecord],
        facts: Facts,
    ) -> ServerState:
        """The state after the round, from the finished mean and the personal tensors uploaded, in client-id order."""


class LocalData(Protocol):
    """A site's images, as training sees them."""

    @property
    def samples(self) -> int:
        """Number of images."""

    @property
    def labels(self) -> "Tensor":
        """Their labels."""

    def batches(self, size: int, seed: int) -> "Iterator[tuple[Tensor, Tensor]]":
        """One pass over all images in an order that follows from the seed: (images B×C×H×W, labels B)."""


@dataclass(frozen=True)
class BatchProgress:
    """How far local training is."""

    epoch: int
    batch: int
    batches: int
    images: int
    loss: float
    accuracy: float


class TrainingInterrupted(Exception):
    """Local training was asked to stop; nothing has changed."""


@dataclass(frozen=True)
class RoundTask:
    """A client's part in a round."""

    client_id: str
    round: int
    shared: Tensors
    personal: Tensors
    facts: Facts = field(default_factory=dict)


def _plain_runtime() -> "Runtime":
    from shared.runtime import Runtime

    return Runtime()


@dataclass(frozen=True)
class Workplace:
    """What the agent lends to a method: its data, its device, and two ways to be heard while training runs."""

    data: LocalData
    runtime: "Runtime" = field(default_factory=_plain_runtime)
    on_batch: Callable[[BatchProgress], None] | None = None
    should_stop: Callable[[], bool] = lambda: False


class Predictor(Protocol):
    """A model that is ready to answer, with the client's offset in it where the method has one."""

    def __call__(self, images: "Tensor") -> "Tensor":
        """Normalised images (B, C, H, W) → logits (B, classes); safe to call from several threads."""


class ClientHalf(ABC):
    """The agent's part of a method."""

    def __init__(self, plan: FederationPlan) -> None:
        self.plan = plan

    @abstractmethod
    def train(self, task: RoundTask, private: Tensors, workplace: Workplace) -> tuple[Update, Tensors]:
        """One round of local training: the update to upload, and the private tensors to keep once it is stored."""

    @abstractmethod
    def predictor(self, task: RoundTask, private: Tensors, runtime: "Runtime", *, use_offset: bool = True) -> Predictor:
        """What `/predict` and evaluation use after a round; `task` carries the newest model and personal tensors.

        Without `use_offset` a method that has one leaves it out, for comparison.
        """

    def alternative(self, task: RoundTask, private: Tensors, runtime: "Runtime") -> Predictor | None:
        """A second model that the client keeps, to be measured beside the predictor's; None for methods with one."""
        del task, private, runtime
        return None

    def offset(self, task: RoundTask, private: Tensors) -> "Tensor | None":
        """The offset that the predictor applies; None for methods without one."""
        del task, private
        return None
