"""Which model `/predict` answers with: the newest that scores well enough here, or the one it is pinned to."""

import logging
import threading
import time
from collections.abc import Callable

from client_agent import serving
from client_agent.condition import Condition, TroubleKind
from client_agent.data import SiteData
from client_agent.errors import StateError
from client_agent.history import HistoryLine
from client_agent.kept_models import Bundle
from client_agent.serving import PredictionQueue, ServingModel
from client_agent.settings import Identity, RunOptions
from client_agent.state import StateFolder
from client_agent.text import storable
from client_agent.training import LocalBaseline, measure
from shared.evaluation import Evaluation
from shared.problems import DistransError
from shared.runtime import Runtime

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_SERVE_AGAIN_S = 600.0  # until a first choice that could not be served is tried again
_ROUNDING = 1e-9  # 0.68 - 0.1 is more than 0.58
_MAX_REASON = 500
_DIGEST_CHARACTERS = 64


class ModelGate:
    """Measures new models and lets them replace the served one, or not; what it decides is in the history."""

    def __init__(
        self,
        state: StateFolder,
        identity: Identity,
        runtime: Runtime,
        options: RunOptions,
        predictions: PredictionQueue | None,
        on_serve: Callable[[int, str, str], None] = lambda _number, _digest, _fingerprint: None,
    ) -> None:
        """`on_serve` is told the key of each model that answers from then on."""
        self._state, self._identity, self._runtime = state, identity, runtime
        self._options, self._predictions, self._on_serve = options, predictions, on_serve
        # The loop brings new models, another thread follows the pin: one of them decides at a time.
        self._deciding = threading.Lock()
        self._followed_pin: str | None = ""
        self._serve_again_at: float | None = None

    @property
    def served(self) -> ServingModel | None:
        """The model that answers."""
        return None if self._predictions is None else self._predictions.model

    def consider(self, bundle: Bundle, data: SiteData | None) -> HistoryLine:
        """Measure a new model and serve it, unless it is broken, scores too badly, or another one is pinned.

        Whatever is wrong with the model, the served one stays. Raises OSError only when the decision cannot be stored.
        """
        try:
            model = serving.build(self._identity.plan, self._identity.name, bundle, self._runtime)
            own, without = self._measure(model, data)
        except DistransError as error:
            return self.reject(bundle.number, bundle.digest, error, bundle.fingerprint)
        except Exception as error:  # such as a MemoryError: it may be this machine's fault, so it is measured again
            return self.reject(bundle.number, bundle.digest, error, bundle.fingerprint, undecided=True)
        local = self._measure_baseline(data)
        with self._deciding:
            reason = self._objection(own, data)
            pin = "" if reason else self._hold_of_pin()
            line = HistoryLine(
                model=bundle.number,
                digest=bundle.digest,
                fingerprint=bundle.fingerprint,
                with_offset=own,
                without_offset=without,
                local=local,
                served=not pin and not reason,
                held_by_pin=bool(pin),
                undecided=own is None and bool(reason),
                reason=pin or reason,
            )
            self._state.add_history(line)
            if line.served:
                self._put_in_place(model)
        if not line.served:
            logger.warning("model %d is not served: %s", bundle.number, line.reason)
        return line

    def reject(
        self, number: int, digest: str, error: Exception, fingerprint: str = "", *, undecided: bool = False
    ) -> HistoryLine:
        """Record why a model cannot be used; without a fingerprint it is one that could not even be fetched."""
        if isinstance(error, DistransError):
            reason = str(error)
        else:
            logger.error("model %d failed in a way that was not expected", number, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        line = HistoryLine(
            model=number,
            digest=storable(digest, _DIGEST_CHARACTERS),
            fingerprint=fingerprint,
            with_offset=None,
            without_offset=None,
            served=False,
            undecided=undecided,
            reason=storable(reason, _MAX_REASON),
        )
        with self._deciding:
            self._state.add_history(line)
        logger.warning("model %d is not served: %s", number, line.reason)
        return line

    def serve_kept(self) -> None:
        """Serve the pinned model, or the last one that the gate approved; needs no coordinator and never raises."""
        with self._deciding:
            self._serve_again_at = time.monotonic() + _SERVE_AGAIN_S  # unless the first choice can be served
            try:
                self._followed_pin = self._state.pin_text()
            except OSError:  # see follow_pin
                self._followed_pin = None
            try:
                _, model = serving.load_served(self._state, self._identity, self._runtime)
                if self._state.choices()[0].holds(*model.key):
                    self._serve_again_at = None
            except StateError as error:
                if self.served is None:
                    logger.info("there is nothing to serve yet: %s", error.message)
            except Exception:
                logger.exception("the kept models cannot be read")
            else:
                self._put_in_place(model)

    def _put_in_place(self, model: ServingModel) -> None:
        if self._predictions is not None:
            self._predictions.model = model
            self._on_serve(*model.key)

    def follow_pin(self, stopping: threading.Event, condition: Condition) -> None:
        """Watch the pin, so that `distrans-agent pin` takes effect at once; runs in a thread of its own.

        While the pin cannot be read, the served model stays.
        """
        while not stopping.wait(_LOOK_EVERY_S):
            try:
                pin = self._state.pin_text()
            except OSError as error:
                condition.record(
                    TroubleKind.PIN,
                    f"{self._state.path / 'pin'} cannot be read: {error.strerror}. The served model stays. "
                    "Give the file to the agent's user, or delete it.",
                )
                continue
            condition.clear(TroubleKind.PIN)
            is_due = self._serve_again_at is not None and time.monotonic() >= self._serve_again_at
            if pin != self._followed_pin or is_due:
                self.serve_kept()

    def _measure(self, model: ServingModel, data: SiteData | None) -> tuple[Evaluation | None, Evaluation | None]:
        """What a model scores here with the offset and without."""
        if data is None:
            return None, None
        plan = self._identity.plan
        return measure(model.own, data, plan), measure(model.none, data, plan)

    def _measure_baseline(self, data: SiteData | None) -> Evaluation | None:
        """What the site's own model scores; its faults are not the new model's."""
        if data is None or not self._options.local_baseline:
            return None
        try:
            weights = self._state.baseline()
            if not weights:
                return None
            predictor = LocalBaseline(self._identity.plan, self._identity.name).predictor(weights, self._runtime)
            return measure(predictor, data, self._identity.plan)
        except Exception as error:
            logger.warning("this site's own model could not be measured: %s", error)
            return None

    def _hold_of_pin(self) -> str:
        """Why an approved model must wait; empty when it need not."""
        try:
            self._state.pin_text()
        except OSError as error:
            return "" if self.served is None else f"the pin cannot be read: {error.strerror}"
        pinned = self._state.pinned()
        return "" if pinned is None else f"/predict is pinned to model {pinned}"

    def _objection(self, score: Evaluation | None, data: SiteData | None = None) -> str:
        """Why a new model should not replace the approved ones; empty when it may."""
        margin, best = self._options.max_accuracy_drop, self._state.best_approved()
        if margin is None or best is None:
            return ""
        old = (best.with_offset and best.with_offset.accuracy) or 0.0
        if score is None:  # a failed measurement is not a bad model, but it does not replace one that was measured
            return f"{_why_unmeasured(data)}; model {best.model} scored {old:.1%}" if self._state.choices() else ""
        new = score.accuracy or 0.0
        if new < old - margin - _ROUNDING:
            return (
                f"it scores {new:.1%} where model {best.model} has {old:.1%}; --max-accuracy-drop allows {margin:.1%}"
            )
        return ""


def _why_unmeasured(data: SiteData | None) -> str:
    if data is None:
        return "it was not measured, because this agent has no images at hand"
    if not data.test.samples:
        return "it was not measured, because there are no held-out images"
    readable = data.test.samples - len(data.test.unreadable)
    found = f"only {readable}" if readable else "none"
    return f"it was not measured, because {found} of the {data.test.samples} held-out images can be read"
