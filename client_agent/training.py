"""Local training: a round of the federation."""

import logging
from functools import partial

from client_agent.context import AgentContext
from client_agent.data.dataset import SiteData
from client_agent.errors import DataError, StopRequested, describe_error
from client_agent.progress import TrainingDisplay
from client_agent.state.kept_models import Bundle
from client_agent.status import AgentStatus, Phase, TroubleKind
from client_agent.threads import TrainingThreads, limit_threads, most_training_threads, time_steps
from shared.contract.messages import RoundTaskView
from shared.learning.methods import client_half
from shared.learning.methods.base import BatchProgress, RoundTask, TrainingContext, TrainingInterrupted, Update
from shared.learning.residuals import train_round
from shared.tensors.names import Tensors

logger = logging.getLogger(__name__)


class Trainer:
    """Local training that records its troubles; every method may raise StopRequested."""

    def __init__(self, context: AgentContext) -> None:
        self._context, self._status = context, context.status
        plan, options, runtime = context.identity.plan, context.options, context.runtime
        self._half = client_half(plan)
        measure = partial(time_steps, plan, runtime, context.stopping.is_set)
        self._threads = (
            TrainingThreads(most_training_threads(serves=options.serve is not None), measure)
            if options.train_threads is None and runtime.device.type == "cpu"
            else None
        )

    def train(self, current: RoundTaskView, bundle: Bundle, data: SiteData) -> tuple[Update, Tensors] | None:
        """Return the update and what to keep once it is acknowledged; None if this round cannot be trained here.

        Raises DataError if too many images cannot be read: the round may work once they are back.
        """
        self._status.enter(Phase.TRAINING, current.number)
        name, kept = self._context.identity.name, self._context.state.kept()
        task = RoundTask(name, current.number, bundle.shared, bundle.personal, current.facts, bundle.made_in)
        if self._threads is not None:
            limit_threads(self._threads.choose())
        try:
            with TrainingDisplay(current.number, self._context.console) as display:

                def show(progress: BatchProgress) -> None:
                    display.update(progress)
                    self._status.note_progress(progress.batch, progress.batches)

                context = TrainingContext(data.train, self._context.runtime, show, self._context.stopping.is_set)
                trained = train_round(self._half, task, kept, context)
        except TrainingInterrupted as error:
            raise StopRequested from error
        except DataError as error:
            self._record(current.number, error, "Trying again in a minute.", "too many images cannot be read")
            raise
        except Exception as error:  # such as a diverged loss, or torch's RuntimeError when out of memory
            logger.debug("could not train round %d", current.number, exc_info=error)
            next_step = "Waiting for the next round; /predict keeps answering."
            self._record(current.number, error, next_step, type(error).__name__)
            return None
        if self._threads is not None:
            self._threads.note_round(trained[0].report.seconds, trained[0].report.batches)
        self._status.clear(TroubleKind.TRAINING)
        report_unreadable(self._status, data)
        return trained

    def _record(self, number: int, error: Exception, next_step: str, told: str) -> None:
        self._status.record(
            TroubleKind.TRAINING,
            f"Round {number} could not be trained here: {describe_error(error)} {next_step}",
            told=f"Round {number} could not be trained: {told}.",
        )


def report_unreadable(status: AgentStatus, data: SiteData) -> None:
    """Record which images could not be read, or that all can be read again."""
    if found := data.describe_unreadable():
        count = len(data.train.unreadable) + len(data.test.unreadable)
        told = f"{count} of {data.train.samples + data.test.samples} images cannot be read."
        status.record(TroubleKind.IMAGES, found, told)
    else:
        status.clear(TroubleKind.IMAGES)
