"""The offset aggregation network: from what the coordinator knows of a client to an offset for it.

    e (N) [+ code of the last offset (hidden)] → SN-Linear ReLU SN-Linear Linear → hidden×1×1
      → ConvT k4 → width×4×4 → as many doublings as the image needs → crop → tanh → C×H×W

The authors run it with batch size 1 and BatchNorm in training mode, which is InstanceNorm; it is built so. Spectral
norm takes its power iteration in training mode only, hence `emit` (in eval mode) is a pure function of the state.
"""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from shared.method_options import GeneratorOptions
from shared.plan import FederationPlan
from shared.seeds import seeded

Tensors = dict[str, Tensor]
_NARROWEST = 16


class OffsetGenerator(nn.Module):
    """One embedding (and one offset, if it was built to see it) → one offset."""

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
                nn.Linear(64 * 4 * 4, hidden),
            )
            inputs += hidden
        self.mlp = nn.Sequential(
            spectral_norm(nn.Linear(inputs, hidden)),
            nn.ReLU(),
            spectral_norm(nn.Linear(hidden, hidden)),
            nn.Linear(hidden, hidden),
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
    """The network with its optimiser; `state` and `restore` carry both, as named tensors, from round to round."""

    def __init__(self, plan: FederationPlan, options: GeneratorOptions) -> None:
        self.options = options
        with seeded(plan.seed, "offset-generator"):
            self.net = OffsetGenerator(len(plan.classes), plan.image.shape, options)
        make = torch.optim.SGD if options.optimizer == "sgd" else torch.optim.Adam
        self.optimizer = make(self.net.parameters(), lr=options.lr)

    def emit(self, embedding: Tensor, offset: Tensor) -> Tensor:
        """The offset for a client: a function of the state and the arguments alone."""
        self.net.eval()
        with torch.no_grad():
            generated: Tensor = self.net(embedding, offset)
        return self.options.mix * generated + (1 - self.options.mix) * offset

    def regress(self, embedding: Tensor, offset: Tensor) -> float:
        """Move the network's output for this client towards the offset it uploaded; the squared error before."""
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
        """Weights and optimiser state as named tensors."""
        return {
            **{f"net.{name}": value.detach().clone() for name, value in self.net.state_dict().items()},
            **optimizer_tensors(self.optimizer, self.net, "optimizer."),
        }

    def restore(self, state: Tensors) -> None:
        """Take up a state that `state` gave."""
        weights = {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}
        self.net.load_state_dict(weights)
        restore_optimizer(self.optimizer, self.net, state, "optimizer.")


def optimizer_tensors(optimizer: torch.optim.Optimizer, net: nn.Module, prefix: str) -> Tensors:
    """The optimiser's tensors per parameter (momentum …) as `prefix + key + ":" + parameter name`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    return {
        f"{prefix}{key}:{names[parameter]}": value.detach().clone()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, net: nn.Module, tensors: Tensors, prefix: str) -> None:
    """Give the optimiser the tensors that `optimizer_tensors` took from its like."""
    parameters = dict(net.named_parameters())
    optimizer.state.clear()
    for full_name, value in tensors.items():
        if full_name.startswith(prefix):
            key, _, name = full_name.removeprefix(prefix).partition(":")
            optimizer.state[parameters[name]][key] = value.clone()
