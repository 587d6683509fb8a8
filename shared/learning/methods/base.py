"""The contract of a method: its server half runs at the coordinator, its client half at every agent.

Server halves take and return numpy's arrays, client halves torch's tensors. A coordinator that only averages does
without torch; what needs it is named in `torch_calls`, and runs in another process.

Tensors come in three kinds. *Shared* tensors are the same for all clients and averaged on upload. *Personal* tensors
are addressed to one client, in either direction. *Private* tensors never leave the agent, which keeps them from round
to round. A federation runs as follows, where `round_` is a RoundContext:

    state = server.initial_state()
    for each round:
        facts = server.facts(roster)
        for each participant:
            personal = server.personal(state, client, round_)
            task = RoundTask(client.id, number, as_tensors(state.shared), as_tensors(personal), facts)
            update, private = client_half.train(task, private, …)
            server.fold(mean, update.shared, client)
        state = server.finish(state, mean.result(), uploads, round_)

Halves hold no state: they take state and return new state, so a round repeated after a crash gives the same result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeVar

from shared.contract.class_totals import class_totals_fact
from shared.contract.frozen import Frozen
from shared.contract.limits import MAX_WEIGHT
from shared.contract.measurements import TrainingReport
from shared.contract.plan import FederationPlan
from shared.tensors.names import PERSONAL, SHARED, Tensors, add_prefix
from shared.tensors.spec import Spec
from shared.tensors.wire import encode

if TYPE_CHECKING:
    from torch import Tensor

    from shared.learning.runtime import Runtime
    from shared.tensors.arrays import Array, Arrays
    from shared.tensors.mean import RunningMean

Options = TypeVar("Options", bound=Frozen)
_BATCHNORM_BUFFERS = {"running_mean", "running_var", "num_batches_tracked"}  # the only ones of built-in backbones
Facts = dict[str, str]  # what a round adds to the plan: class totals, the offset aggregation in force, …


def options_of(plan: FederationPlan, kind: type[Options]) -> Options:
    """Return the plan's method options, which must be of this kind."""
    if not isinstance(plan.method, kind):
        raise TypeError(f"this plan is for {plan.method.name}")
    return plan.method


@dataclass(frozen=True)
class ClientRecord:
    """What the coordinator knows about a client."""

    id: str
    class_counts: tuple[int, ...]

    @property
    def images(self) -> int:
        """Total number of training images; 0 if the client withholds its class counts."""
        return sum(self.class_counts)


def known_counts(clients: Iterable[ClientRecord]) -> list[tuple[int, ...]]:
    """Return the class counts of the clients that do not withhold them."""
    return [client.class_counts for client in clients if client.images]


PersonalUploads = Iterable[tuple[ClientRecord, "Arrays"]]  # each client's personal tensors


@dataclass(frozen=True)
class RoundContext:
    """What the coordinator freezes when a round opens: the enrolled clients and its decisions beyond the plan."""

    roster: Sequence[ClientRecord]
    facts: Facts


@dataclass(frozen=True)
class ServerState:
    """What the coordinator keeps between rounds: the published model, and tensors that never leave it.

    Either may be read from storage only when it is used.
    """

    shared: "Mapping[str, Array]"
    private: "Mapping[str, Array]" = field(default_factory=dict)


TorchCall = Literal["personal", "next_private", "update_spec"]


class ServerHalf(ABC):
    """The coordinator's half of a method."""

    def __init__(self, plan: FederationPlan) -> None:
        self.plan = plan

    @abstractmethod
    def initial_state(self, pretrained: "Mapping[str, Tensor] | None" = None) -> ServerState:
        """Return θ⁰ and the rest of the initial state; `pretrained` weights replace the random ones. Needs torch."""

    def facts(self, roster: Sequence[ClientRecord]) -> Facts:
        """Return what the next round adds to the plan; frozen when it opens and sent to its participants.

        Every method publishes the federation's class totals; some add decisions of their own.
        """
        return class_totals_fact(client.class_counts for client in roster)

    def torch_calls(self, facts: Facts) -> Collection[TorchCall]:
        """Return which calls of a running federation need torch under these facts."""
        del facts
        return ()

    def personal(self, state: ServerState, client: ClientRecord, round_: RoundContext) -> "Arrays":
        """Return the personal tensors to send to a client; a pure function of `state.private` and the rest."""
        del state, client, round_
        return {}

    def weight(self, client: ClientRecord) -> int:
        """Return a client's weight in the mean, from the frozen roster rather than from its update."""
        return min(max(client.images, 1), MAX_WEIGHT) if self.plan.averaging == "samples" else 1

    def fold(
        self, mean: "RunningMean", shared: "Mapping[str, Array] | Mapping[str, Tensor]", client: ClientRecord
    ) -> None:
        """Add a client's shared tensors to the round's mean, in any order."""
        mean.add(shared, self.weight(client))

    def finish(self, state: ServerState, mean: "Arrays", uploads: PersonalUploads, round_: RoundContext) -> ServerState:
        """Return the state after the round. `uploads` are the personal tensors, in client-id order."""
        return ServerState(next_shared(state.shared, mean), self.next_private(state.private, uploads, round_))

    def next_private(self, private: "Mapping[str, Array]", uploads: PersonalUploads, round_: RoundContext) -> "Arrays":
        """Return the private state after the round, for methods where it does not depend on the mean."""
        del private, uploads, round_
        return {}

    @abstractmethod
    def update_spec(self, facts: Facts) -> Spec:
        """Return the spec of an update before it is compressed, with wire names. Builds the network: needs torch."""

    def stored_update_spec(self, shared: Spec, private: Spec, facts: Facts) -> Spec | None:
        """Return `update_spec` if it follows from the specs of a stored state, without torch; None if it does not."""
        del shared, private, facts
        return None

    def upload_spec(self, facts: Facts) -> Spec:
        """Return the spec of an update as it is uploaded. Needs torch."""
        from shared.tensors.compression import compressed_spec

        return compressed_spec(self.update_spec(facts), self.plan.training.update_compression)

    def received(
        self, uploaded: "Mapping[str, Array] | Mapping[str, Tensor]", base: "Mapping[str, Array]"
    ) -> "Mapping[str, Array] | Mapping[str, Tensor]":
        """Return the shared tensors of an upload, restored from the model that its round started from."""
        from shared.tensors.arrays import as_arrays
        from shared.tensors.compression import restore

        compression = self.plan.training.update_compression
        return uploaded if compression == "none" else restore(as_arrays(uploaded), base, compression)

    def model_spec(self) -> Spec:
        """Return the spec of the published model; agents check downloads against it. Needs torch."""
        return Spec.of(self.initial_state().shared)

    def personal_specs(self, facts: Facts) -> Sequence[Spec]:
        """Return the specs that personal tensors sent to a client may match under these facts; at least one."""
        del facts
        return [Spec({})]

    def private_spec(self, found: Spec) -> Spec:
        """Return the spec that stored private state with the spec `found` must match before it is used. Needs torch.

        By default, tensors of the initial state must be present and keep their shape.
        """
        return found | Spec.of(self.initial_state().private)


def next_shared(shared: "Mapping[str, Array]", mean: "Arrays") -> "Arrays":
    """Return the model after a round: the mean, and the tensors that are not averaged as they were."""
    return {name: shared[name] for name in shared if name not in mean} | mean


def averaged_parameters(shared: Spec, plan: FederationPlan) -> Spec | None:
    """Return the parameters among a model's tensors by their names; None for backbones that we do not know."""
    if ":" in plan.model.backbone:
        return None
    return Spec(
        {name: entry for name, entry in shared.entries.items() if name.rpartition(".")[2] not in _BATCHNORM_BUFFERS}
    )


@dataclass(frozen=True)
class RoundTask:
    """A client's part in a round: the model, its personal tensors and the round's facts.

    `model_round` is the round that made the model, by default the one before; after a rollback it is an older one.
    """

    client_id: str
    round: int
    shared: Tensors
    personal: Tensors
    facts: Facts = field(default_factory=dict)
    model_round: int | None = None


class LocalData(Protocol):
    """A site's training images."""

    @property
    def samples(self) -> int:
        """Number of images."""

    @property
    def labels(self) -> "Tensor":
        """Label of each image."""

    def batches(self, size: int, seed: int) -> "Iterator[tuple[Tensor, Tensor]]":
        """Yield (images B×C×H×W, labels B) in one pass over all images, in an order determined by the seed."""


@dataclass(frozen=True)
class BatchProgress:
    """The progress of local training after a batch. The means are read from the device when somebody asks for them."""

    epoch: int
    batch: int
    batches: int
    images: int
    sums: "Tensor"  # of the losses, and of the right predictions, over all images so far

    @property
    def loss(self) -> float:
        """Mean loss per image so far."""
        return float(self.sums[0]) / self.images

    @property
    def accuracy(self) -> float:
        """Share of right predictions so far."""
        return float(self.sums[1]) / self.images


def _default_runtime() -> "Runtime":
    from shared.learning.runtime import Runtime

    return Runtime()


@dataclass(frozen=True)
class TrainingContext:
    """What the agent provides for training: its data, its device, and hooks for progress and interruption."""

    data: LocalData
    runtime: "Runtime" = field(default_factory=_default_runtime)
    on_batch: Callable[[BatchProgress], None] | None = None
    should_stop: Callable[[], bool] = lambda: False


class TrainingInterrupted(Exception):
    """Local training stopped on request; nothing has changed."""


@dataclass(frozen=True)
class Update:
    """What a client uploads for a round."""

    shared: Tensors
    personal: Tensors
    report: TrainingReport

    def encode(self) -> bytes:
        """Return the update in wire format."""
        tensors = add_prefix(self.shared, SHARED) | add_prefix(self.personal, PERSONAL)
        return encode(tensors, {"report": self.report.model_dump_json()})


class Predictor(Protocol):
    """A model ready to predict, including the client's offset if the method has one."""

    def __call__(self, images: "Tensor") -> "Tensor":
        """Map normalized images (B, C, H, W) to logits (B, classes). Thread-safe."""


class ClientHalf(ABC):
    """The agent's half of a method."""

    is_personal: ClassVar[bool] = False  # whether it predicts with a model of the client's own, not with everyone's
    can_adapt: ClassVar[bool] = True  # whether its predictor is one network that more cross-entropy steps may improve

    def __init__(self, plan: FederationPlan) -> None:
        self.plan = plan

    @abstractmethod
    def train(self, task: RoundTask, private: Tensors, context: TrainingContext) -> tuple[Update, Tensors]:
        """Train for one round; return the update and the private tensors to keep once the update is stored."""

    @abstractmethod
    def predictor(self, task: RoundTask, private: Tensors, runtime: "Runtime", *, use_offset: bool = True) -> Predictor:
        """Return the predictor for `/predict` and evaluation; `task` has the newest model and personal tensors.

        `use_offset=False` leaves out the offset, if the method has one, for comparison.
        """

    def alternative(self, task: RoundTask, private: Tensors, runtime: "Runtime") -> Predictor | None:
        """Return the predictor of a second model the client keeps, to evaluate alongside; None by default."""
        del task, private, runtime
        return None

    def offset(self, task: RoundTask, private: Tensors) -> "Tensor | None":
        """Return the offset the predictor applies; None for methods without one."""
        del task, private
        return None
