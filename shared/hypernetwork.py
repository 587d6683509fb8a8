"""pFedHN's hypernetwork: from the embedding of a client to the weights of its model.

    v (e) → Linear → hidden → [ReLU, Linear] × n → one Linear head for each tensor of the model

Everything is a function of named tensors: `phi.…` are the weights, `embedding.CLIENT` the rows, `momentum.…` the
optimiser's memory of both. What is missing is made from the seed, so that clients may join at any time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.method_options import HypernetworkOptions
from shared.seeds import seeded

Tensors = dict[str, Tensor]
_PHI, _EMBEDDING, _MOMENTUM = "phi.", "embedding.", "momentum."
_FIRST = f"{_PHI}layer.0"


def embedding_dim(clients: int) -> int:
    """The authors' width of an embedding for so many clients."""
    return int(1 + clients / 4)


@dataclass(frozen=True)
class Hypernetwork:
    """Makes tensors of the given shapes."""

    shapes: Mapping[str, tuple[int, ...]]
    options: HypernetworkOptions
    seed: int

    @property
    def head_bytes(self) -> int:
        """Bytes of the heads, which are nearly all of it."""
        return 4 * (self.options.hidden + 1) * sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self) -> Tensors:
        """The weights that do not depend on the number of clients."""
        hidden = self.options.hidden
        tensors: Tensors = {}
        with seeded(self.seed, "hypernetwork"):
            for number in range(1, self.options.hidden_layers + 1):
                tensors |= _linear(f"{_PHI}layer.{number}", hidden, hidden)
            for name, shape in self.shapes.items():
                tensors |= _linear(f"{_PHI}head.{name}", hidden, math.prod(shape))
        return tensors

    def complete(self, state: Tensors, clients: Sequence[str]) -> Tensors:
        """The state with a first layer, and with a row for each of the clients."""
        if f"{_FIRST}.weight" not in state:
            width = self.options.embedding_dim or embedding_dim(len(clients))
            with seeded(self.seed, "hypernetwork", "first"):
                state = state | _linear(_FIRST, width, self.options.hidden)
        width = state[f"{_FIRST}.weight"].shape[1]
        rows = {}
        for client in clients:
            if _EMBEDDING + client not in state:
                with seeded(self.seed, "embedding", client):
                    rows[_EMBEDDING + client] = torch.randn(width)
        return {name: _aligned(value) for name, value in (state | rows).items()}

    def emit(self, state: Tensors, client: str) -> Tensors:
        """The client's tensors, in the graph of the state's."""
        x = _apply(state, _FIRST, state[_EMBEDDING + client])
        for number in range(1, self.options.hidden_layers + 1):
            x = _apply(state, f"{_PHI}layer.{number}", F.relu(x))
        return {name: _apply(state, f"{_PHI}head.{name}", x).view(shape) for name, shape in self.shapes.items()}

    def gradient(self, state: Tensors, client: str, delta: Tensors) -> Tensors:
        """Jᵀ Δ for the weights and the client's row: that of ½ ‖h(v) − θ_end‖² where Δ = h(v) − θ_end."""
        # Sorted: the norm that they are clipped by must not depend on the order in which a file holds them.
        names = sorted([name for name in state if name.startswith(_PHI)] + [_EMBEDDING + client])
        leaves = {name: state[name].detach().requires_grad_() for name in names}
        outputs = self.emit(leaves, client)
        pulls = [delta[name].clone() for name in outputs]  # a bias' gradient is the very tensor that is put in here
        return dict(zip(names, torch.autograd.grad(list(outputs.values()), list(leaves.values()), pulls), strict=True))

    def follow(self, state: Tensors, uploads: Iterable[tuple[str, Tensors]]) -> Tensors:
        """The state after a round of uploads Δ, by the plan's rule."""
        state = {name: value.clone() for name, value in state.items()}  # steps are taken in place: they are large
        if self.options.uploads == "sequential":
            for client, delta in uploads:
                self._step(state, self.gradient(state, client, delta))
            return state
        total: Tensors = {}
        count = 0
        for client, delta in uploads:
            for name, value in self.gradient(state, client, delta).items():
                total[name] = total[name].add_(value) if name in total else value
            count += 1
        if count:
            self._step(state, {name: value.div_(count) for name, value in total.items()})
        return state

    def _step(self, state: Tensors, gradient: Tensors) -> None:
        """One step of SGD on all weights and all rows: decay and momentum reach rows that have no gradient too.

        Changes the state, and uses the gradient up.
        """
        options = self.options
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in gradient.values()]))
        scale = torch.clamp(options.clip_norm / (norm + 1e-6), max=1.0)
        row_lr = options.lr if options.embedding_lr is None else options.embedding_lr
        for name in [name for name in state if not name.startswith(_MOMENTUM)]:
            value, push = state[name], gradient.get(name)
            push = torch.zeros_like(value) if push is None else push.mul_(scale)
            push.add_(value, alpha=options.weight_decay)
            if options.momentum and _MOMENTUM + name in state:
                push = state[_MOMENTUM + name].mul_(options.momentum).add_(push)
            elif options.momentum:
                state[_MOMENTUM + name] = push
            value.sub_(push, alpha=row_lr if name.startswith(_EMBEDDING) else options.lr)


def _linear(name: str, inputs: int, outputs: int) -> Tensors:
    layer = nn.Linear(inputs, outputs)
    return {f"{name}.weight": layer.weight.detach(), f"{name}.bias": layer.bias.detach()}


def _apply(state: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _aligned(value: Tensor) -> Tensor:
    """Where torch itself would put it: tensors that lie as they were read from a file give other last digits."""
    return value if value.data_ptr() % 64 == 0 else value.clone()
