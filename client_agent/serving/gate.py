"""The gate: picks what answers `/predict`, the best candidate of the newest model that does well enough, or the pin."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from client_agent.data.dataset import SiteData
from client_agent.errors import StateError, describe_error
from client_agent.model_key import ModelKey
from client_agent.serving.examination import Examined, Examiner
from client_agent.serving.model import ServingModel, load_served
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
        on_serve: Callable[[ModelKey, str], None] = lambda _key, _record: None,
    ) -> None:
        """Call `on_serve` with each model's key and its candidate's digest when it starts to answer."""
        self._state, self._identity, self._runtime = state, identity, runtime
        self._options, self._predictions, self._on_serve = options, predictions, on_serve
        self._examiner = Examiner(state, identity, runtime, options)
        # The loop brings new models and another thread follows the pin; only one may decide at a time.
        self._deciding = threading.Lock()
        self._followed_pin: str | None = ""
        self._serve_retry_at: float | None = None

    @property
    def served(self) -> ServingModel | None:
        """The model that answers now."""
        return None if self._predictions is None else self._predictions.model

    def consider(self, bundle: Bundle, data: SiteData | None) -> GateDecision:
        """Measure a new model and serve its best candidate, unless it is broken, scores too low, or another is pinned.

        If anything is wrong with the model, the served one stays. Raises OSError if the decision cannot be stored.
        """
        try:
            found = self._examiner.examine(bundle, data)
        except DistransError as error:
            return self.reject(bundle.number, bundle.digest, error, bundle.fingerprint)
        except Exception as error:  # such as a MemoryError: perhaps this machine's fault, so measure it again later
            return self.reject(bundle.number, bundle.digest, error, bundle.fingerprint, undecided=True)
        with self._deciding:
            decision = self._decide(bundle, found, self._reason_to_reject(found.assessment.score, data))
        if not decision.served:
            logger.warning("model %d is not served: %s", bundle.number, decision.reason)
        return decision

    def reconsider(self, bundle: Bundle, data: SiteData) -> GateDecision | None:
        """Decide again about a model after the site's own models have changed; None if the old decision stands.

        It does if the model cannot be measured now, or if it was approved and no candidate is good enough any more.
        """
        try:
            found = self._examiner.examine(bundle, data)
        except Exception as error:
            logger.warning("could not measure model %d again: %s", bundle.number, describe_error(error))
            return None
        with self._deciding:
            reason = self._reason_to_reject(found.assessment.score, data)
            if reason and any(kept.holds(bundle.key) for kept in self._state.models.approved()):
                logger.info("model %d is served as before: %s", bundle.number, reason)
                return None
            return self._decide(bundle, found, reason)

    def is_outdated(self, bundle: Bundle) -> bool:
        """Return whether the site's own models have changed since the gate decided about a model."""
        current = {base: stored.digest for base, stored in self._examiner.own_models(bundle.fingerprint).items()}
        lines = [line for line in self._state.models.history() if line.fingerprint == bundle.fingerprint]
        return bool(lines) and lines[-1].considered != current

    def _decide(self, bundle: Bundle, found: Examined, reason: str) -> GateDecision:
        """Store a decision and act on it; the candidate's files come first, so that the decision can be followed."""
        pin = "" if reason else self._reason_held_by_pin()
        record = self._state.models.save_record(bundle.key, found.record, found.weights)
        assessment = found.assessment
        decision = GateDecision(
            model=bundle.number,
            digest=bundle.digest,
            fingerprint=bundle.fingerprint,
            with_offset=assessment.with_offset,
            without_offset=assessment.without_offset,
            local=assessment.local,
            candidate=assessment.candidate.name,
            record=record,
            score=assessment.score,
            tested=assessment.tested,
            considered=dict(found.considered),
            served=not pin and not reason,
            held_by_pin=bool(pin),
            undecided=assessment.score is None and bool(reason),
            reason=pin or reason,
        )
        self._state.models.add_decision(decision)
        if decision.served:
            self._swap_in(replace(found.model, record=record))
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
                _, model = load_served(self._state, self._identity, self._runtime, self._options.prior)
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
            self._on_serve(model.key, model.record)

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
        old = (best.compared and best.compared.accuracy) or 0.0
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
