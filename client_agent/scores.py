"""Reports what a model scored here, in the log and to the coordinator, as far as the site shares it."""

import logging

from client_agent.context import AgentContext
from client_agent.coordinator.client import Coordinator
from client_agent.errors import AgentEnded
from client_agent.state.decisions import GateDecision
from client_agent.state.kept_models import Bundle
from client_agent.state.records import SiteReport, describe_verdict_so_far
from shared.contract.errors import DistransError
from shared.contract.measurements import EvaluationReport

logger = logging.getLogger(__name__)


class ScoreReporter:
    """Reports decisions of the gate. A report that cannot be delivered is logged, and the next one is tried."""

    def __init__(self, context: AgentContext) -> None:
        self._state, self._shared = context.state, context.options.share_verdict

    def report(self, coordinator: Coordinator, bundle: Bundle, decision: GateDecision, *, is_new: bool = True) -> None:
        """Log a decision and send its scores. Raises AgentEnded if the agent's part is over."""
        own, what = decision.with_offset, "received" if is_new else "measured again:"
        if own is None or own.accuracy is None:
            logger.info("%s model %d: not measured", what, bundle.number)
            return
        score = f"{100 * own.accuracy:.1f} % accuracy on {own.samples} held-out images"
        logger.info("%s model %d: %s; best as %s", what, bundle.number, score, decision.candidate)
        try:
            report = self._state.models.report(bundle.key, decision.record)
            if report is not None and report.verdict is not None:
                logger.info("model %d: %s", bundle.number, describe_verdict_so_far(report))
            self._send(coordinator, bundle.number, decision, report)
        except AgentEnded:
            raise
        except DistransError as error:
            logger.warning("could not deliver the score of model %d: %s", bundle.number, error)

    def _send(self, coordinator: Coordinator, number: int, decision: GateDecision, report: SiteReport | None) -> None:
        if decision.with_offset is None:
            return
        sent = EvaluationReport(**decision.with_offset.model_dump())
        is_shared = self._shared != "none" and report is not None and not report.is_alone_behind
        if report is not None and report.verdict is not None and is_shared:
            candidate = decision.candidate if self._shared == "full" else None
            sent = sent.model_copy(update={"paired": report.verdict.paired, "candidate": candidate})
        coordinator.report_evaluation(number, sent)
