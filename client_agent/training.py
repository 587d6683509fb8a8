"""Local training: a round of the federation."""

import logging

from client_agent.context import AgentContext
from client_agent.data.dataset import SiteData
from client_agent.errors import DataError, StopRequested, describe_error
from client_agent.progress import TrainingDisplay
from client_agent.state.kept_models import Bundle
from client_agent.status import AgentStatus, Phase, TroubleKind
from shared.contract.messages import RoundTaskView
from shared.learning.methods import client_half
from shared.learning.methods.base import BatchProgress, RoundTask, TrainingContext, TrainingInterrupted, Update
from shared.tensors.names import Tensors

logger = logging.getLogger(__name__)


class Trainer:
    """Local training that records its troubles; every method may raise StopRequested."""

    def __init__(self, context: AgentContext) -> None:
        self._context, self._status = context, context.status
        self._half = client_half(context.identity.plan)

    def train(self, current: RoundTaskView, bundle: Bundle, data: SiteData) -> tuple[Update, Tensors] | None:
        """Return the update and its private tensors; None if this round cannot be trained here.

        Raises DataError if too many images cannot be read: the round may work once they are back.
        """
        self._status.enter(Phase.TRAINING, current.number)
        task = RoundTask(self._context.identity.name, current.number, bundle.shared, bundle.personal, current.facts)
        private = self._context.state.private()
        try:
            with TrainingDisplay(current.number, self._context.console) as display:

                def show(progress: BatchProgress) -> None:
                    display.update(progress)
                    self._status.note_progress(progress.batch, progress.batches)

                context = TrainingContext(data.train, self._context.runtime, show, self._context.stopping.is_set)
                trained = self._half.train(task, private, context)
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
