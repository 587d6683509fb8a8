"""A server half for programs that compute with torch anyway: agents and the lab."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shared.learning.methods.base import ClientRecord, Facts, RoundContext, ServerHalf, ServerState
from shared.tensors.arrays import Array, as_arrays, as_tensors
from shared.tensors.names import Tensors


@dataclass(frozen=True)
class TensorState:
    """A `ServerState` with torch's tensors."""

    shared: Tensors
    private: Tensors = field(default_factory=dict)


class TensorHalf:
    """A server half that takes and returns torch's tensors; their values are the same."""

    def __init__(self, half: ServerHalf) -> None:
        self.half = half

    def initial_state(self, pretrained: Mapping[str, Tensor] | None = None) -> TensorState:
        """Return θ⁰ and the rest of the initial state."""
        return _as_tensor_state(self.half.initial_state(pretrained))

    def facts(self, roster: Sequence[ClientRecord]) -> Facts:
        """Return what the next round adds to the plan."""
        return self.half.facts(roster)

    def personal(self, state: TensorState, client: ClientRecord, round_: RoundContext) -> Tensors:
        """Return the personal tensors to send to a client."""
        return as_tensors(self.half.personal(_as_state(state), client, round_))

    def finish(
        self,
        state: TensorState,
        mean: "Mapping[str, Tensor | Array]",
        uploads: Iterable[tuple[ClientRecord, Tensors]],
        round_: RoundContext,
    ) -> TensorState:
        """Return the state after the round; uploads are the personal tensors, in client-id order."""
        arrays = ((client, as_arrays(tensors)) for client, tensors in uploads)
        return _as_tensor_state(self.half.finish(_as_state(state), as_arrays(mean), arrays, round_))


def _as_state(state: TensorState) -> ServerState:
    return ServerState(as_arrays(state.shared), as_arrays(state.private))


def _as_tensor_state(state: ServerState) -> TensorState:
    return TensorState(as_tensors(state.shared), as_tensors(state.private))
