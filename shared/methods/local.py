"""Local training as every method does it: epochs, mini-batches, seeds, progress, interruption and the report."""

import itertools
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.methods.base import BatchProgress, RoundTask, TrainingInterrupted, Workplace
from shared.model import batchnorms
from shared.plan import FederationPlan, TrainingPlan
from shared.problems import DistransError
from shared.runtime import Runtime
from shared.schemas import MAX_LOSS, TrainingReport
from shared.seeds import RandomStream, derive_seed

# One optimisation step on a batch: returns the logits it was computed from and the loss, both detached.
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make_sgd(net: nn.Module, training: TrainingPlan) -> torch.optim.SGD:
    """The model's optimiser, new in every round."""
    return torch.optim.SGD(
        net.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )


class ModelStepper:
    """Takes the model's step for a loss, with loss scaling and clipping where they are on; plain SGD by default."""

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
        """`clip_norm` stands in where the plan names none; `clipped` are the parameters it holds for, if not all."""
        self._parameters = list(net.parameters() if clipped is None else clipped)
        self._optimizer = optimizer or make_sgd(net, plan.training)
        self._scaler = runtime.scaler()
        self._clip_norm = clip_norm if plan.training.clip_norm is None else plan.training.clip_norm

    @property
    def loss_scale(self) -> float:
        """What the next loss, and so every gradient taken from it, is multiplied by."""
        return self._scaler.get_scale()

    def step(self, loss: Tensor) -> None:
        """Backward pass and step; gradients of anything else in the graph are left in place."""
        self._optimizer.zero_grad()
        self._scaler.scale(loss).backward()
        if self._clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()


def run_local_epochs(
    plan: FederationPlan,
    task: RoundTask,
    net: nn.Module,
    place: Workplace,
    step: Step,
    *,
    steps: int | None = None,
    reshuffle: bool = False,
) -> TrainingReport:
    """Run the plan's epochs of `step` over the site's data and report on them.

    With `steps` it is so many batches instead, in as many passes as they take; with `reshuffle` too, each of them is
    the first one of a new shuffle. Raises TrainingInterrupted between two batches when asked to stop. A last batch of
    one image is left out for networks with BatchNorm, which cannot normalise it.
    """
    size, epochs = plan.training.batch_size, plan.training.epochs
    shortest = 2 if batchnorms(net) else 1
    per_epoch = place.data.samples // size + (place.data.samples % size >= shortest)
    if place.data.samples < shortest:
        raise DistransError(
            f"This site has {place.data.samples} training images; {plan.model.backbone} needs at least {shortest}.",
            next_step="Check the data folder.",
        )
    if size < shortest:
        raise DistransError(
            f"{plan.model.backbone} has BatchNorm, which cannot normalise batches of one image.",
            next_step="The operator should raise training.batch_size in the plan.",
        )
    device = place.runtime.device
    totals = torch.zeros(2, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    images = batches = 0
    started = time.perf_counter()
    wanted = per_epoch * epochs if steps is None else steps
    passes = _passes(plan, task, place, epochs if steps is None else None, reshuffle)
    random = RandomStream(plan.seed, "training", task.client_id, task.round, device=device)
    with closing(passes):
        for epoch, (x, y) in passes:
            if place.should_stop():
                raise TrainingInterrupted
            if len(y) < shortest:
                continue
            x, y = place.runtime.move(x), y.to(device, non_blocking=True)
            with random.drawn():
                logits, loss = step(x, y)
            right = (logits.argmax(dim=1) == y).sum()
            totals += torch.stack([loss.detach().to(totals) * len(y), right.to(totals)])  # stays on the device
            images, batches = images + len(y), batches + 1
            if place.on_batch is not None:
                loss_sum, right_sum = totals.tolist()
                place.on_batch(BatchProgress(epoch, batches, wanted, images, loss_sum / images, right_sum / images))
            if batches == wanted:
                break
    loss_sum, right_sum = totals.tolist()
    if not loss_sum <= MAX_LOSS * images:  # NaN is not
        raise DistransError(
            f"Training diverged: the mean loss is {loss_sum / images:.3g}.",
            next_step="The operator should lower training.lr or set training.clip_norm in the plan.",
        )
    return TrainingReport(
        samples=place.data.samples,
        batches=batches,
        loss=max(loss_sum / images, 0.0),
        accuracy=right_sum / images,
        seconds=time.perf_counter() - started,
    )


def _passes(
    plan: FederationPlan, task: RoundTask, place: Workplace, epochs: int | None, only_first: bool
) -> Generator[tuple[int, tuple[Tensor, Tensor]], None, None]:
    for epoch in itertools.count() if epochs is None else range(epochs):
        seed = derive_seed(plan.seed, "batches", task.client_id, task.round, epoch)
        for batch in place.data.batches(plan.training.batch_size, seed):
            yield epoch, batch
            if only_first:
                break


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, averaged over the batch, in float32 whatever the precision of the network."""
    return F.cross_entropy(logits.float(), labels)
