"""pFedHN's hypernetwork: maps a client's embedding to the weights of its model.

    v (e) → Linear → hidden → [ReLU, Linear] × n → one Linear head per tensor of the model

The state is named tensors: `phi.…` are the weights, `embedding.CLIENT` the embeddings, `momentum.…` the optimizer's
momentum for both. Missing tensors are created from the seed, so clients may join at any time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.contract.method_options import HypernetworkOptions
from shared.learning.seeds import seeded
from shared.tensors.names import Tensors

_PHI, _EMBEDDING, _MOMENTUM = "phi.", "embedding.", "momentum."
_FIRST = f"{_PHI}layer.0"


def embedding_dim(clients: int) -> int:
    """Return the authors' embedding width for this number of clients."""
    return int(1 + clients / 4)


@dataclass(frozen=True)
class Hypernetwork:
    """A hypernetwork that generates tensors of the given shapes."""

    shapes: Mapping[str, tuple[int, ...]]
    options: HypernetworkOptions
    seed: int

    @property
    def head_bytes(self) -> int:
        """Size of the heads, which make up nearly all of the hypernetwork."""
        return 4 * (self.options.hidden + 1) * sum(math.prod(shape) for shape in self.shapes.values())

    def initial(self) -> Tensors:
        """Return the weights that do not depend on the number of clients."""
        hidden = self.options.hidden
        tensors: Tensors = {}
        with seeded(self.seed, "hypernetwork"):
            for number in range(1, self.options.hidden_layers + 1):
                tensors |= _linear(f"{_PHI}layer.{number}", hidden, hidden)
            for name, shape in self.shapes.items():
                tensors |= _linear(f"{_PHI}head.{name}", hidden, math.prod(shape))
        return tensors

    def complete(self, state: Tensors, clients: Sequence[str]) -> Tensors:
        """Return the state with a first layer and an embedding for each client."""
        if f"{_FIRST}.weight" not in state:
            width = self.options.embedding_dim or embedding_dim(len(clients))
            with seeded(self.seed, "hypernetwork", "first"):
                state = state | _linear(_FIRST, width, self.options.hidden)
        width = state[f"{_FIRST}.weight"].shape[1]
        embeddings = {}
        for client in clients:
            if _EMBEDDING + client not in state:
                with seeded(self.seed, "embedding", client):
                    embeddings[_EMBEDDING + client] = torch.randn(width)
        return {name: _aligned(value) for name, value in (state | embeddings).items()}

    def generate(self, state: Tensors, client: str) -> Tensors:
        """Return the client's tensors, differentiable with respect to the state."""
        x = _apply(state, _FIRST, state[_EMBEDDING + client])
        for number in range(1, self.options.hidden_layers + 1):
            x = _apply(state, f"{_PHI}layer.{number}", F.relu(x))
        return {name: _apply(state, f"{_PHI}head.{name}", x).view(shape) for name, shape in self.shapes.items()}

    def gradient(self, state: Tensors, client: str, delta: Tensors) -> Tensors:
        """Return Jᵀ Δ for the weights and the client's embedding: the gradient of ½ ‖Δ‖² for Δ = h(v) − θ_end."""
        # Sorted, because the norm used for clipping must not depend on the order of tensors in a file.
        names = sorted([name for name in state if name.startswith(_PHI)] + [_EMBEDDING + client])
        leaves = {name: state[name].detach().requires_grad_() for name in names}
        outputs = self.generate(leaves, client)
        pulls = [delta[name].clone() for name in outputs]  # autograd returns this very tensor as a bias's gradient
        return dict(zip(names, torch.autograd.grad(list(outputs.values()), list(leaves.values()), pulls), strict=True))

    def apply_updates(self, state: Tensors, uploads: Iterable[tuple[str, Tensors]]) -> Tensors:
        """Return the state after a round of uploads Δ."""
        state = {
            name: value.clone() for name, value in state.items()
        }  # steps are in place because the tensors are large
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
        """Take one SGD step on all weights and embeddings; decay and momentum apply even without a gradient.

        Modifies both the state and the gradient.
        """
        options = self.options
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in gradient.values()]))
        scale = torch.clamp(options.clip_norm / (norm + 1e-6), max=1.0)
        embedding_lr = options.lr if options.embedding_lr is None else options.embedding_lr
        for name in [name for name in state if not name.startswith(_MOMENTUM)]:
            value, push = state[name], gradient.get(name)
            push = torch.zeros_like(value) if push is None else push.mul_(scale)
            push.add_(value, alpha=options.weight_decay)
            if options.momentum and _MOMENTUM + name in state:
                push = state[_MOMENTUM + name].mul_(options.momentum).add_(push)
            elif options.momentum:
                state[_MOMENTUM + name] = push
            value.sub_(push, alpha=embedding_lr if name.startswith(_EMBEDDING) else options.lr)


def _linear(name: str, inputs: int, outputs: int) -> Tensors:
    layer = nn.Linear(inputs, outputs)
    return {f"{name}.weight": layer.weight.detach(), f"{name}.bias": layer.bias.detach()}


def _apply(state: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _aligned(value: Tensor) -> Tensor:
    """Return the tensor in memory aligned as torch allocates it; other alignments change the last digits of results."""
    return value if value.data_ptr() % 64 == 0 else value.clone()
