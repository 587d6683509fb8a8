"""Which model `/predict` answers with: the newest that scores well enough here, or the one it is pinned to."""

import logging
import threading

from client_agent import serving
from client_agent.data import SiteData
from client_agent.serving import PredictionQueue, ServingModel
from client_agent.settings import Identity, RunOptions
from client_agent.state import Bundle, HistoryLine, StateFolder
from client_agent.training import LocalBaseline, measure
from shared.evaluation import Evaluation
from shared.problems import DistransError
from shared.runtime import Runtime

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5


class ModelGate:
    """Measures new models and lets them take the served one's place, or not; what it decides is in the history."""

    def __init__(
        self,
        state: StateFolder,
        identity: Identity,
        data: SiteData | None,
        runtime: Runtime,
        options: RunOptions,
        predictions: PredictionQueue | None,
    ) -> None:
        self._state, self._identity, self._data = state, identity, data
        self._runtime, self._options, self._predictions = runtime, options, predictions
        # The loop brings new models, another thread follows the pin: one of them decides at a time.
        self._deciding = threading.Lock()

    @property
    def served(self) -> ServingModel | None:
        """The model that answers."""
        return None if self._predictions is None else self._predictions.model

    def consider(self, bundle: Bundle) -> HistoryLine:
        """Measure a new model and serve it, unless it is broken, scores too badly, or another one is pinned."""
        number = bundle.number
        try:
            model = self._build(bundle)
            own, without, local = self._measure(model)
        except DistransError as error:  # the served model stays; the federation may recover
            line = HistoryLine(model=number, with_offset=None, without_offset=None, served=False, reason=str(error))
            self._state.add_history(line)
        else:
            with self._deciding:
                pinned, reason = self._state.pinned(), self._objection(own)
                held = pinned is not None and not reason
                line = HistoryLine(
                    model=number,
                    with_offset=own,
                    without_offset=without,
                    local=local,
                    served=not held and not reason,
                    held_by_pin=held,
                    reason=f"/predict is pinned to model {pinned}" if held else reason,
                )
                self._state.add_history(line)
                if line.served:
                    self._swap(model)
        if not line.served:
            logger.warning("model %d is not served: %s", number, line.reason)
        return line

    def serve_kept(self) -> None:
        """Serve the pinned model, or the newest kept one that nothing speaks against; needs no coordinator."""
        with self._deciding:
            numbers = self._state.bundle_numbers()
            if not numbers:
                return
            refused = {line.model for line in self._state.history() if not line.approved}
            wanted = self._state.pinned()
            if wanted is None:
                wanted = next((number for number in reversed(numbers) if number not in refused), numbers[-1])
            try:
                self._swap(self._build(self._state.load_bundle(wanted)))
            except DistransError as error:
                logger.warning("the kept model %d cannot be served: %s", wanted, error)

    def follow_pin(self, stopping: threading.Event) -> None:
        """Watch the pin, so that `distrans-agent pin` takes effect at once; runs in a thread of its own."""
        last = self._state.pinned()
        while not stopping.wait(_LOOK_EVERY_S):
            now = self._state.pinned()
            if now != last:
                last = now
                self.serve_kept()

    def _build(self, bundle: Bundle) -> ServingModel:
        return serving.build(self._identity.plan, self._identity.name, bundle, self._runtime)

    def _measure(self, model: ServingModel) -> tuple[Evaluation | None, Evaluation | None, Evaluation | None]:
        """What a model scores here with the offset and without, and what the site's own model scores."""
        if self._data is None:
            return None, None, None
        plan, local = self._identity.plan, None
        weights = self._state.baseline() if self._options.local_baseline else {}
        if weights:
            predictor = LocalBaseline(plan, self._identity.name).predictor(weights, self._runtime)
            local = measure(predictor, self._data, plan)
        return measure(model.own, self._data, plan), measure(model.none, self._data, plan), local

    def _objection(self, score: Evaluation | None) -> str:
        """Why a new model should not take the last approved one's place; empty when it may."""
        margin = self._options.max_accuracy_drop
        approved = [line for line in self._state.history() if line.approved and line.with_offset is not None]
        if margin is None or score is None or not approved:
            return ""
        last = approved[-1]
        new, old = score.accuracy or 0.0, (last.with_offset and last.with_offset.accuracy) or 0.0
        if new < old - margin:
            return (
                f"it scores {new:.1%} where model {last.model} has {old:.1%}; --max-accuracy-drop allows {margin:.1%}"
            )
        return ""

    def _swap(self, model: ServingModel) -> None:
        if self._predictions is not None:
            self._predictions.model = model
