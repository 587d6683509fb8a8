"""Local training, the same for every method: epochs, batches, seeds, progress, interruption and the report."""

import itertools
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.contract.errors import DistransError
from shared.contract.limits import MAX_LOSS
from shared.contract.measurements import TrainingReport
from shared.contract.plan import FederationPlan, TrainingPlan
from shared.contract.seeds import derive_seed
from shared.learning.methods.base import BatchProgress, RoundTask, TrainingContext, TrainingInterrupted
from shared.learning.model import batchnorms
from shared.learning.runtime import Runtime
from shared.learning.seeds import RandomStream

# One optimization step on a batch: (images, labels) → the logits it was computed from and the loss, both detached.
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch, in float32 whatever the network's precision."""
    return F.cross_entropy(logits.float(), labels)


def make_sgd(net: nn.Module, training: TrainingPlan) -> torch.optim.SGD:
    """Return a new optimizer for the model; every round starts with a new one."""
    return torch.optim.SGD(
        net.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )


def count_steps(net: nn.Module, training: TrainingPlan, images: int) -> int:
    """Return how many steps a round's epochs take; BatchNorm cannot normalize a last batch of one image."""
    whole, rest = divmod(images, training.batch_size)
    return (whole + (rest >= _shortest_batch(net))) * training.epochs


def _shortest_batch(net: nn.Module) -> int:
    return 2 if batchnorms(net) else 1


class ModelStepper:
    """Takes the model's optimization steps, with loss scaling and clipping if enabled; plain SGD by default."""

    def __init__(
        self,
        net: nn.Module,
        plan: FederationPlan,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        clip_norm: float | None = None,
        clipped: Iterable[nn.Parameter] | None = None,
    ) -> None:
        """`clip_norm` applies if the plan sets none; `clipped` limits clipping to these parameters."""
        self._parameters = list(net.parameters() if clipped is None else clipped)
        self._optimizer = optimizer or make_sgd(net, plan.training)
        self._scaler = runtime.scaler()
        self._clip_norm = clip_norm if plan.training.clip_norm is None else plan.training.clip_norm

    @property
    def loss_scale(self) -> float:
        """The factor applied to the next loss and therefore to all of its gradients."""
        return self._scaler.get_scale()

    def step(self, loss: Tensor) -> None:
        """Run the backward pass and take a step; gradients of other tensors in the graph are left in place."""
        self._optimizer.zero_grad()
        self._scaler.scale(loss).backward()
        if self._clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()


def plain_step(net: nn.Module, stepper: ModelStepper, runtime: Runtime) -> Step:
    """Return a step on the cross-entropy of the network's logits."""
    forward = runtime.forward_of(net)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with runtime.autocast():
            logits = forward(x)
        loss = mean_loss(logits, y)
        stepper.step(loss)
        return logits.detach(), loss.detach()

    return step


class _Totals:
    """Loss and accuracy so far; the sums stay on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self.images = self.batches = 0

    def add(self, logits: Tensor, loss: Tensor, labels: Tensor) -> None:
        correct = (logits.argmax(dim=1) == labels).sum()
        # A new tensor, so that progress reported earlier keeps its figures.
        self.sums = self.sums + torch.stack([loss.detach().to(self.sums) * len(labels), correct.to(self.sums)])
        self.images += len(labels)
        self.batches += 1

    def means(self) -> tuple[float, float]:
        loss_sum, correct = self.sums.tolist()
        return loss_sum / self.images, correct / self.images


@dataclass(frozen=True)
class LocalTraining:
    """A client's local training in one round."""

    plan: FederationPlan
    task: RoundTask
    context: TrainingContext

    def run(self, net: nn.Module, step: Step, *, steps: int | None = None, reshuffle: bool = False) -> TrainingReport:
        """Apply `step` to the site's batches for the plan's epochs, or for `steps` batches, and report.

        With `reshuffle`, each batch is the first of a new shuffle. For networks with BatchNorm, which cannot normalize
        one image, a last batch of one image is skipped. Raise TrainingInterrupted between batches if asked to stop.
        """
        context, training, device = self.context, self.plan.training, self.context.runtime.device
        shortest = _shortest_batch(net)
        self._check_sizes(shortest)
        wanted = count_steps(net, training, context.data.samples) if steps is None else steps
        totals, started = _Totals(device), time.perf_counter()
        random = RandomStream(self.plan.seed, "training", self.task.client_id, self.task.round, device=device)
        with closing(self._batches(training.epochs if steps is None else None, reshuffle)) as batches:
            for epoch, (x, y) in batches:
                if context.should_stop():
                    raise TrainingInterrupted
                if len(y) < shortest:
                    continue
                x, y = context.runtime.move(x), y.to(device, non_blocking=True)
                with random.drawn():
                    logits, loss = step(x, y)
                totals.add(logits, loss, y)
                if context.on_batch is not None:
                    context.on_batch(BatchProgress(epoch, totals.batches, wanted, totals.images, totals.sums))
                if totals.batches == wanted:
                    break
        mean, accuracy = totals.means()
        if not mean <= MAX_LOSS:  # also true for NaN
            raise DistransError(
                f"Training diverged: the mean loss is {mean:.3g}.",
                next_step="The operator should lower training.lr or set training.clip_norm in the plan.",
            )
        return TrainingReport(
            samples=context.data.samples,
            batches=totals.batches,
            loss=max(mean, 0.0),
            accuracy=accuracy,
            seconds=time.perf_counter() - started,
        )

    def _check_sizes(self, shortest: int) -> None:
        samples, backbone = self.context.data.samples, self.plan.model.backbone
        if samples < shortest:
            raise DistransError(
                f"This site has {samples} training images; {backbone} needs at least {shortest}.",
                next_step="Check the data folder.",
            )
        if self.plan.training.batch_size < shortest:
            raise DistransError(
                f"{backbone} has BatchNorm, which cannot normalize batches of one image.",
                next_step="The operator should raise training.batch_size in the plan.",
            )

    def _batches(
        self, epochs: int | None, only_first: bool
    ) -> Generator[tuple[int, tuple[Tensor, Tensor]], None, None]:
        """Yield each batch with its epoch; without `epochs`, never end."""
        for epoch in itertools.count() if epochs is None else range(epochs):
            seed = derive_seed(self.plan.seed, "batches", self.task.client_id, self.task.round, epoch)
            for batch in self.context.data.batches(self.plan.training.batch_size, seed):
                yield epoch, batch
                if only_first:
                    break
