"""Trains the models that a site has for itself, and never keeps a round waiting.

*Alone* gets a third of a round's training time after each upload. The steps it could not take are owed, and taken while
the agent waits. *Adapted* is made from the newest model while the agent waits, also within a third of a round's time;
once the federation has finished, it takes all of its epochs. Whatever fails here is logged and affects nothing else.
"""

import logging
import time
from collections.abc import Callable

from client_agent.context import AgentContext
from client_agent.data.dataset import SiteData
from client_agent.errors import StateError, StopRequested, describe_error
from client_agent.serving.baseline import LocalBaseline
from client_agent.state.kept_models import Bundle
from client_agent.status import Phase
from shared.learning.adaptation import adapt
from shared.learning.methods import client_half
from shared.learning.methods.base import TrainingContext, TrainingInterrupted
from shared.tensors.names import Tensors

logger = logging.getLogger(__name__)
_SHARE = 1 / 3  # of the round's training time


class OwnTraining:
    """The training of a site's own models; every method may raise StopRequested."""

    def __init__(self, context: AgentContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._context, self._clock = context, clock
        self._options, self._state, self._status = context.options, context.state, context.status
        identity = context.identity
        self._half, self._baseline = client_half(identity.plan), LocalBaseline(identity.plan, identity.name)
        self._budget_s: float | None = None  # None until a round was trained
        self._rounds = 0  # trained here, by their numbers
        self._steps: int | None = None  # taken by alone; None: not read yet
        self._failed_rounds = -1  # where alone failed; it is tried again a round later
        self._adapted: tuple[str, int] | None = None  # fingerprint of the model, and epochs
        self._given_up = ""  # fingerprint of a model that cannot be adapted, or not in time
        self._decided: tuple[str, bool] | None = None  # a model, and whether the gate knows the newest own models

    # What there is to do

    def has_work(self, bundle: Bundle, data: SiteData, *, is_over: bool) -> bool:
        """Return whether there is something to train or to decide about while the agent has nothing else to do."""
        return (
            self._is_adaptation_due(bundle, is_over) or self._owed_steps(bundle, data) > 0 or self.is_undecided(bundle)
        )

    def is_undecided(self, bundle: Bundle) -> bool:
        """Return whether own models have changed since the gate decided about a model."""
        if self._decided is None or self._decided[0] != bundle.fingerprint:
            self._decided = bundle.fingerprint, not self._context.gate.is_outdated(bundle)
        return not self._decided[1]

    def note_decision(self, bundle: Bundle) -> None:
        """Note that the gate has decided about a model, knowing the own models as they are."""
        self._decided = bundle.fingerprint, True

    # Doing it

    def follow_round(self, number: int, bundle: Bundle, data: SiteData, seconds: float) -> None:
        """Train alone after an upload, for a third of the time that the round's training took."""
        self._rounds, self._budget_s = max(self._rounds, number), _SHARE * seconds
        deadline = self._clock() + self._budget_s
        self._train_alone(bundle, data, lambda: self._clock() >= deadline)

    def use_pause(self, bundle: Bundle, data: SiteData, has_news: Callable[[], bool], *, is_over: bool) -> None:
        """Train while there is nothing else to do; stop within a batch once there is."""
        if self._is_adaptation_due(bundle, is_over):
            self._adapt(bundle, data, has_news, is_over=is_over)
        if (owed := self._owed_steps(bundle, data)) > 0:
            logger.info("training this site's own model: %d steps behind the federation's", owed)
        self._train_alone(bundle, data, has_news)

    # Alone

    def _owed_steps(self, bundle: Bundle, data: SiteData) -> int:
        """Return how many steps alone is behind the federation's model, had this site taken part in every round."""
        rounds = max(self._rounds, bundle.number)
        if not self._options.alone or self._failed_rounds >= rounds:
            return 0
        if self._steps is None:
            stored = self._state.own.alone()
            self._steps = 0 if stored is None else stored.count("steps")
        return rounds * self._baseline.steps_per_round(data.train.samples) - self._steps

    def _train_alone(self, bundle: Bundle, data: SiteData, is_time_up: Callable[[], bool]) -> None:
        try:
            while (owed := self._owed_steps(bundle, data)) > 0 and not is_time_up():
                self._status.enter(Phase.TRAINING_ALONE, max(self._rounds, bundle.number))
                weights, taken = self._alone_so_far(bundle)
                steps = min(owed, self._baseline.steps_per_round(data.train.samples))  # then it is stored
                trained, done = self._baseline.advance(weights, taken, steps, self._training(data), is_time_up)
                self._state.own.save_alone(trained, taken + done)
                self._steps, self._decided = taken + done, (bundle.fingerprint, False)
                self._stop_if_asked()
        except TrainingInterrupted:
            self._stop_if_asked()
        except StopRequested:
            raise
        except Exception as error:
            self._failed_rounds = max(self._rounds, bundle.number)
            logger.error("could not train this site's own model: %s", describe_error(error))

    def _alone_so_far(self, bundle: Bundle) -> tuple[Tensors, int]:
        """Return alone's weights and steps; from the start if there are none, or they are damaged."""
        stored = self._state.own.alone()
        if stored is not None:
            try:
                return stored.tensors, stored.count("steps")
            except StateError as error:
                logger.warning("%s Training this site's own model from the start.", error.message)
        return self._baseline.start(bundle.shared if bundle.number == 0 else None), 0

    # Adapted

    def _is_adaptation_due(self, bundle: Bundle, is_over: bool) -> bool:
        if self._options.adapt == "off" or not self._half.can_adapt or self._given_up == bundle.fingerprint:
            return False
        if self._adapted is None or self._adapted[0] != bundle.fingerprint:
            stored = self._state.own.adapted(bundle.fingerprint, self._options.adapt)
            self._adapted = bundle.fingerprint, 0 if stored is None else stored.count("epochs")
        epochs = self._adapted[1]
        return epochs < self._options.adapt_epochs if is_over else not epochs and self._budget_s is not None

    def _adapt(self, bundle: Bundle, data: SiteData, has_news: Callable[[], bool], *, is_over: bool) -> None:
        self._status.enter(Phase.ADAPTING, bundle.number)
        deadline = None if is_over or self._budget_s is None else self._clock() + self._budget_s
        kept: dict[int, Tensors] = {}

        def keep(epoch: int, weights: Tensors) -> None:
            kept.clear()
            kept[epoch] = weights

        def is_time_up() -> bool:
            return deadline is not None and self._clock() >= deadline

        try:
            task = bundle.task(self._context.identity.name)
            context = self._training(data, lambda: has_news() or is_time_up())
            epochs, head_only = self._options.adapt_epochs, self._options.adapt == "head"
            try:
                trained = adapt(
                    self._half, task, bundle.private, context, epochs=epochs, head_only=head_only, on_epoch=keep
                )
                if trained is not None:
                    keep(epochs, trained)
            except TrainingInterrupted:
                self._stop_if_asked()
                if not is_time_up():
                    return
            for epoch, weights in kept.items():
                self._state.own.save_adapted(weights, bundle.fingerprint, self._options.adapt, epoch)
                self._adapted, self._decided = (bundle.fingerprint, epoch), (bundle.fingerprint, False)
                logger.info("fine-tuned model %d on this site's images for %d epochs", bundle.number, epoch)
            if not kept:
                self._given_up = bundle.fingerprint
        except StopRequested:
            raise
        except Exception as error:
            self._given_up = bundle.fingerprint
            logger.error("could not fine-tune model %d: %s", bundle.number, describe_error(error))

    def _training(self, data: SiteData, should_stop: Callable[[], bool] = lambda: False) -> TrainingContext:
        return TrainingContext(
            data.train, self._context.runtime, None, lambda: self._context.stopping.is_set() or should_stop()
        )

    def _stop_if_asked(self) -> None:
        if self._context.stopping.is_set():
            raise StopRequested
