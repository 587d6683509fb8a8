"""The gate: picks the model for `/predict`, the newest that scores well enough here or the pinned one."""

import logging
import threading
import time
from collections.abc import Callable

from client_agent.data.dataset import SiteData
from client_agent.errors import StateError, describe_error
from client_agent.model_key import ModelKey
from client_agent.serving.baseline import LocalBaseline
from client_agent.serving.evaluation import measure
from client_agent.serving.model import ServingModel, build, load_served
from client_agent.serving.queue import PredictionQueue
from client_agent.settings import Identity, RunOptions
from client_agent.state.decisions import GateDecision
from client_agent.state.folder import StateFolder
from client_agent.state.kept_models import Bundle
from client_agent.status import AgentStatus, TroubleKind
from client_agent.text import truncate_and_escape
from shared.contract.errors import DistransError
from shared.contract.measurements import Evaluation
from shared.learning.runtime import Runtime

logger = logging.getLogger(__name__)
_POLL_INTERVAL_S = 0.5
_SERVE_RETRY_S = 600.0  # until a first choice that could not be served is tried again
_ROUNDING = 1e-9  # 0.68 - 0.1 is more than 0.58
_MAX_REASON = 500
_DIGEST_CHARACTERS = 64


class ModelGate:
    """The decision whether a new model replaces the served one; every decision goes into the history."""

    def __init__(
        self,
        state: StateFolder,
        identity: Identity,
        runtime: Runtime,
        options: RunOptions,
        predictions: PredictionQueue | None,
        on_serve: Callable[[ModelKey], None] = lambda _key: None,
    ) -> None:
        """Call `on_serve` with the key of each model when it starts to answer."""
        self._state, self._identity, self._runtime = state, identity, runtime
        self._options, self._predictions, self._on_serve = options, predictions, on_serve
        # The loop brings new models and another thread follows the pin; only one may decide at a time.
        self._deciding = threading.Lock()
        self._followed_pin: str | None = ""
        self._serve_retry_at: float | None = None

    @property
    def served(self) -> ServingModel | None:
        """The model that answers now."""
        return None if self._predictions is None else self._predictions.model

    def consider(self, bundle: Bundle, data: SiteData | None) -> GateDecision:
        """Measure a new model and serve it, unless it is broken, scores too low, or another one is pinned.

        If anything is wrong with the model, the served one stays. Raises OSError if the decision cannot be stored.
        """
        try:
            model = build(self._identity.plan, self._identity.name, bundle, self._runtime)
            own, without = self._measure(model, data)
        except DistransError as error:
            return self.reject(bundle.number, bundle.digest, error, bundle.fingerprint)
        except Exception as error:  # such as a MemoryError: perhaps this machine's fault, so measure it again later
            return self.reject(bundle.number, bundle.digest, error, bundle.fingerprint, undecided=True)
        local = self._measure_baseline(data)
        with self._deciding:
            reason = self._reason_to_reject(own, data)
            pin = "" if reason else self._reason_held_by_pin()
            decision = GateDecision(
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
            self._state.models.add_decision(decision)
            if decision.served:
                self._swap_in(model)
        if not decision.served:
            logger.warning("model %d is not served: %s", bundle.number, decision.reason)
        return decision

    def reject(
        self, number: int, digest: str, error: Exception, fingerprint: str = "", *, undecided: bool = False
    ) -> GateDecision:
        """Record why a model cannot be used; without a fingerprint, it could not even be downloaded."""
        if not isinstance(error, DistransError):
            logger.error("unexpected error with model %d", number, exc_info=error)
        decision = GateDecision(
            model=number,
            digest=truncate_and_escape(digest, _DIGEST_CHARACTERS),
            fingerprint=fingerprint,
            with_offset=None,
            without_offset=None,
            served=False,
            undecided=undecided,
            reason=truncate_and_escape(describe_error(error), _MAX_REASON),
        )
        with self._deciding:
            self._state.models.add_decision(decision)
        logger.warning("model %d is not served: %s", number, decision.reason)
        return decision

    def serve_kept(self) -> None:
        """Serve the pinned model, or else the last approved one. Needs no coordinator and never raises."""
        with self._deciding:
            self._serve_retry_at = time.monotonic() + _SERVE_RETRY_S  # cleared below if the first choice can be served
            try:
                self._followed_pin = self._state.models.pin_text()
            except OSError:  # see follow_pin
                self._followed_pin = None
            try:
                _, model = load_served(self._state, self._identity, self._runtime)
                if self._state.models.servable()[0].holds(model.key):
                    self._serve_retry_at = None
            except StateError as error:
                if self.served is None:
                    logger.info("nothing to serve yet: %s", error.message)
            except Exception:
                logger.exception("could not read the kept models")
            else:
                self._swap_in(model)

    def _swap_in(self, model: ServingModel) -> None:
        if self._predictions is not None:
            self._predictions.model = model
            self._on_serve(model.key)

    def follow_pin(self, stopping: threading.Event, status: AgentStatus) -> None:
        """Watch the pin in a separate thread, so that `distrans-agent pin` takes effect at once.

        While the pin cannot be read, the served model stays.
        """
        while not stopping.wait(_POLL_INTERVAL_S):
            try:
                pin = self._state.models.pin_text()
            except OSError as error:
                status.record(
                    TroubleKind.PIN,
                    f"{self._state.path / 'pin'} cannot be read: {error.strerror}. The served model stays. "
                    "Make the file readable for the agent's user, or delete it.",
                )
                continue
            status.clear(TroubleKind.PIN)
            is_due = self._serve_retry_at is not None and time.monotonic() >= self._serve_retry_at
            if pin != self._followed_pin or is_due:
                self.serve_kept()

    def _measure(self, model: ServingModel, data: SiteData | None) -> tuple[Evaluation | None, Evaluation | None]:
        """Return a model's scores here with and without the offset."""
        if data is None:
            return None, None
        plan = self._identity.plan
        return measure(model.with_offset, data, plan), measure(model.without_offset, data, plan)

    def _measure_baseline(self, data: SiteData | None) -> Evaluation | None:
        """Return the score of the site's own model; its failures must not affect the new model."""
        if data is None or not self._options.local_baseline:
            return None
        try:
            weights = self._state.baseline()
            if not weights:
                return None
            predictor = LocalBaseline(self._identity.plan, self._identity.name).predictor(weights, self._runtime)
            return measure(predictor, data, self._identity.plan)
        except Exception as error:
            logger.warning("could not measure this site's own model: %s", error)
            return None

    def _reason_held_by_pin(self) -> str:
        """Return why an approved model must wait; empty if it need not."""
        try:
            self._state.models.pin_text()
        except OSError as error:
            return "" if self.served is None else f"the pin cannot be read: {error.strerror}"
        pinned = self._state.models.pinned()
        return "" if pinned is None else f"/predict is pinned to model {pinned}"

    def _reason_to_reject(self, score: Evaluation | None, data: SiteData | None = None) -> str:
        """Return why a new model should not replace the approved ones; empty if it may."""
        margin, best = self._options.max_accuracy_drop, self._state.models.best_approved()
        if margin is None or best is None:
            return ""
        old = (best.with_offset and best.with_offset.accuracy) or 0.0
        if score is None:  # an unmeasured model may be good, but it must not replace a measured one
            return (
                f"{_why_unmeasured(data)}; model {best.model} scored {old:.1%}" if self._state.models.servable() else ""
            )
        new = score.accuracy or 0.0
        if new < old - margin - _ROUNDING:
            scores = f"it scores {new:.1%}, model {best.model} scores {old:.1%}"
            return f"{scores}; --max-accuracy-drop allows a drop of {margin:.1%}"
        return ""


def _why_unmeasured(data: SiteData | None) -> str:
    if data is None:
        return "it was not measured because this agent has no images available"
    if not data.test.samples:
        return "it was not measured because there are no held-out images"
    readable = data.test.samples - len(data.test.unreadable)
    found = f"only {readable}" if readable else "none"
    return f"it was not measured because {found} of the {data.test.samples} held-out images can be read"
