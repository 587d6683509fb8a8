"""The offset aggregation network: maps what the coordinator knows about a client to an offset.

    e (N) [+ code of the last offset (hidden)] → SN-Linear ReLU SN-Linear Linear → hidden×1×1
      → ConvT k4 → width×4×4 → as many doublings as the image needs → tanh → crop → C×H×W

The authors run it with batch size 1 and BatchNorm in training mode, which is InstanceNorm, so InstanceNorm is used
here. Spectral norm iterates only in training mode, so `generate`, in eval mode, is a pure function of the state.

The linear layers start without biases, as the authors' do. Embeddings are small, about 1 / clients per class: next to
them, torch's random biases would be so large that all clients get nearly the same offset.
"""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from shared.contract.method_options import GeneratorOptions
from shared.contract.plan import FederationPlan
from shared.learning.initialization import kaiming
from shared.learning.optimizer_state import optimizer_tensors, restore_optimizer
from shared.learning.seeds import seeded
from shared.tensors.names import Tensors, add_prefix, strip_prefix

_NET, _OPTIMIZER = "net.", "optimizer."
_NARROWEST = 16


class OffsetGenerator(nn.Module):
    """Maps one embedding, and optionally the last offset, to an offset."""

    def __init__(self, classes: int, shape: tuple[int, int, int], options: GeneratorOptions) -> None:
        super().__init__()
        self.shape = shape
        channels, height, width = shape
        hidden = options.hidden
        self.encoder: nn.Module | None = None
        inputs = classes
        if options.inputs == "embedding+offset":
            self.encoder = nn.Sequential(
                nn.Conv2d(channels, 32, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(8),
                nn.Conv2d(32, 64, 4, stride=2, padding=1),
                nn.ReLU(),
                nn.Flatten(),
                kaiming(nn.Linear(64 * 4 * 4, hidden)),
            )
            inputs += hidden
        self.mlp = nn.Sequential(
            spectral_norm(kaiming(nn.Linear(inputs, hidden))),
            nn.ReLU(),
            spectral_norm(kaiming(nn.Linear(hidden, hidden))),
            kaiming(nn.Linear(hidden, hidden)),
        )
        doublings = max(0, math.ceil(math.log2(max(height, width) / 4)))
        widths = [max(options.width >> step, _NARROWEST) for step in range(doublings)] + [channels]
        layers: list[nn.Module] = [nn.ConvTranspose2d(hidden, widths[0], 4, bias=False)]
        for before, after in itertools.pairwise(widths):
            layers += [
                nn.InstanceNorm2d(before, affine=True),
                nn.ReLU(),
                nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False),
            ]
        self.decoder = nn.Sequential(*layers, nn.Tanh())

    def forward(self, embedding: Tensor, offset: Tensor) -> Tensor:
        """(N), (C, H, W) → (C, H, W), with values in (−1, 1)."""
        known = embedding[None]
        if self.encoder is not None:
            known = torch.cat([known, self.encoder(offset[None])], dim=1)
        image = self.decoder(self.mlp(known)[:, :, None, None])[0]
        _, height, width = self.shape
        top, left = (image.shape[1] - height) // 2, (image.shape[2] - width) // 2
        return image[:, top : top + height, left : left + width]  # type: ignore[no-any-return]


class GeneratorTrainer:
    """The network and its optimizer; `state` and `restore` carry both from round to round."""

    def __init__(self, plan: FederationPlan, options: GeneratorOptions) -> None:
        self.options = options
        with seeded(plan.seed, "offset-generator"):
            self.net = OffsetGenerator(len(plan.classes), plan.image.shape, options)
        optimizer = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.Adam
        self.optimizer = optimizer(self.net.parameters(), lr=options.lr)

    def generate(self, embedding: Tensor, offset: Tensor) -> Tensor:
        """Return a client's offset, which depends only on the state and the arguments."""
        self.net.eval()
        with torch.no_grad():
            generated: Tensor = self.net(embedding, offset)
        return self.options.mix * generated + (1 - self.options.mix) * offset

    def fit(self, embedding: Tensor, offset: Tensor) -> float:
        """Fit the network's output for a client to the offset it uploaded; return the squared error before."""
        self.net.train()
        first = 0.0
        for step in range(self.options.steps):
            difference = self.net(embedding, offset) - offset
            loss = difference.square().mean() if self.options.reduction == "mean" else difference.square().sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            first = float(loss.detach()) if step == 0 else first
        return first

    def state(self) -> Tensors:
        """Return copies of the weights and the optimizer's state as named tensors."""
        weights = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        return add_prefix(weights, _NET) | add_prefix(optimizer_tensors(self.optimizer, self.net), _OPTIMIZER)

    def restore(self, state: Tensors) -> None:
        """Continue from tensors returned by `state`."""
        self.net.load_state_dict(strip_prefix(state, _NET))
        restore_optimizer(self.optimizer, self.net, strip_prefix(state, _OPTIMIZER))
